"""Status lines, encoded once."""

from http import HTTPStatus

STATUS_LINES: dict[int, bytes] = {
    status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus if status >= 200
}
STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
for _status in range(200, 600):
    # Servers behind the agent use numbers that nobody registered.
    STATUS_LINES.setdefault(_status, b"HTTP/1.1 %d Status %d\r\n" % (_status, _status))
