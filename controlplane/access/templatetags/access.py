"""Words for what a session says of itself."""

import re

from django import template

from controlplane.access import passkeys

register = template.Library()

# The first that fits: browsers name each other in their line, the more particular one further back.
BROWSERS = (("Edg", "Edge"), ("OPR", "Opera"), ("Firefox", "Firefox"), ("Chrome", "Chrome"), ("Safari", "Safari"))
SYSTEMS = (
    ("iPhone", "iPhone"), ("iPad", "iPad"), ("Android", "Android"), ("Windows", "Windows"), ("Mac OS X", "macOS"),
    ("CrOS", "ChromeOS"), ("Linux", "Linux"),
)  # fmt: skip
METHODS = {"password": "password", "mfa": "second factor", "socialaccount": "provider"}


@register.simple_tag(takes_context=True)
def passkey_obstacle(context: template.Context) -> str:
    """Why passkeys cannot work under this address; empty where they can."""
    return passkeys.passkey_obstacle(context["request"])


@register.filter
def device(agent: str) -> str:
    """`Firefox on Windows` out of a User-Agent line; its beginning where neither is known."""
    browser = next((name for sign, name in BROWSERS if re.search(rf"\b(Headless)?{sign}", agent)), "")
    system = next((name for sign, name in SYSTEMS if sign in agent), "")
    if browser and system:
        return f"{browser} on {system}"
    return browser or system or agent[:40] or "Not told"


@register.filter
def sign_in_method(method: str) -> str:
    """`password + mfa` in words; a dash for a session that does not say."""
    parts = [METHODS.get(part, part) for part in method.split(" + ") if part]
    return "passkey" if method == "mfa" else " + ".join(parts) or "—"
