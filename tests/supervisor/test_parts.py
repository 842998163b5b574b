"""The supervisor's parts that need no process."""

from __future__ import annotations

import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from controlplane.supervisor.child import Child, RestartPolicy, is_ready, url_answers
from controlplane.supervisor.diagnosis import Cause, cause_of, ending
from controlplane.supervisor.logs import rotate_if_large


def test_pauses_double_up_to_their_limit():
    policy = RestartPolicy(backoff_s=0.5, backoff_s_max=3.0)
    assert [policy.pause_s(restart) for restart in (1, 2, 3, 4, 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]


def test_log_names_are_plain():
    assert Child("agent GPU-1 / east", []).log_name == "agent-gpu-1-east.log"


@pytest.mark.parametrize(
    ("words", "cause"),
    [
        ("OSError: [Errno 98] Address already in use", Cause.PORT_IN_USE),
        ("[Errno 48] error while attempting to bind on address ('127.0.0.1', 8000)", Cause.PORT_IN_USE),
        ("PANIC: could not write to file: No space left on device", Cause.DISK_FULL),
        ("ConnectionRefusedError: [Errno 111] Connection refused", None),
        ("", None),
    ],
)
def test_reads_incurable_causes_from_the_last_words(words, cause):
    assert cause_of(words) is cause


def test_says_how_a_process_ended():
    assert (ending(-9), ending(3)) == ("was killed by signal 9", "exited with status 3")


def test_a_log_that_is_being_written_is_rotated_without_losing_its_writer(tmp_path):
    log = tmp_path / "web.log"
    with open(log, "ab", buffering=0) as child:
        for number in range(5):
            child.write(b"%d" % number * 100)
            assert rotate_if_large(log, bytes_max=50, kept=3)
        child.write(b"after")
        assert not rotate_if_large(log, bytes_max=50)
    assert log.read_text() == "after"
    assert [(tmp_path / f"web.log.{n}").read_text()[0] for n in (1, 2, 3)] == ["4", "3", "2"]
    assert not (tmp_path / "web.log.4").exists()
    assert not rotate_if_large(tmp_path / "none.log")


def test_ready_by_a_line_of_this_start_only(tmp_path):
    log = tmp_path / "web.log"
    log.write_text("listening\n")
    start = log.stat().st_size
    pattern = re.compile("^listening$", re.MULTILINE)
    assert not is_ready(pattern, log, start)
    log.write_text("listening\nbooting\nlistening\n")
    assert is_ready(pattern, log, start)


def test_ready_by_an_address():
    class Health(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200 if self.path == "/up" else 503)
            self.end_headers()

        def log_message(self, *arguments):
            pass

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        base = f"http://127.0.0.1:{server.server_port}"
        assert url_answers(f"{base}/up")
        assert not url_answers(f"{base}/down")
        server.shutdown()
    assert not url_answers(f"{base}/up")
