"""Where passkeys can work: browsers bind them to a name and to a connection that nobody reads along."""

import ipaddress

from django.conf import settings
from django.http import HttpRequest
from django.http.request import split_domain_port


def passkey_obstacle(request: HttpRequest) -> str:
    """Why a passkey cannot work under the address that the browser asked for, and what to do; empty where it can."""
    host, port = split_domain_port(request.get_host())
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        local = host == "localhost" or host.endswith(".localhost")
        return "" if local or request.is_secure() else f"Passkeys need https. {_by_name()}"
    if address.is_loopback:
        return f"Passkeys need a name: open http{'s' if request.is_secure() else ''}://localhost{port and ':'}{port}/."
    return f"Passkeys need a name, not an address in figures. {_by_name()}"


def _by_name() -> str:
    if settings.PUBLIC_URL:
        return f"Open {settings.PUBLIC_URL}."
    return "Open this installation by its name, with https."
