"""What `requests` may reach on behalf of sign-in: by the outbound client, no redirects, bounded."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests

from controlplane.access import openid_transport
from controlplane.web.outbound import networks


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        if self.path == "/away":
            self.send_response(302)
            self.send_header("location", "http://169.254.169.254/latest")
            self.end_headers()
            return
        body = b'{"a": "' + b"x" * (openid_transport.BODY_BYTES_MAX if self.path == "/large" else 3) + b'"}'
        self.send_response(200)
        self.send_header("content-type", "application/json")
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args):
        pass


@pytest.fixture
def address(settings):
    settings.OUTBOUND_ALLOW = networks(["127.0.0.0/8"])
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    server.server_close()


def test_an_answer_comes_as_requests_gives_it(address):
    with openid_transport.session() as session:
        answer = session.post(f"{address}/token", data={"code": "1"})
        assert (answer.status_code, answer.json()) == (200, {"a": "xxx"})
        assert answer.headers["Content-Type"] == "application/json"


def test_a_redirect_is_not_followed(address):
    with openid_transport.session() as session, pytest.raises(requests.TooManyRedirects):
        session.get(f"{address}/away")


def test_what_is_too_large_is_no_json(address):
    with openid_transport.session() as session, pytest.raises(requests.RequestException):
        session.get(f"{address}/large").json()


@pytest.mark.parametrize("host", ["127.0.0.1", "169.254.169.254", "10.0.0.1", "[::1]"])
def test_addresses_that_are_not_public_are_refused(settings, host):
    settings.OUTBOUND_ALLOW = ()
    with openid_transport.session() as session, pytest.raises(requests.ConnectionError, match="not a public address"):
        session.get(f"http://{host}/")
