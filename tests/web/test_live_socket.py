"""The browser's half of the live socket, against a real WebSocket server that plays scripted frames."""

import json
import threading
import time
from datetime import UTC, datetime

import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.server import serve

pytestmark = pytest.mark.browser

START = """async (port) => {
    const { LiveSocket } = await import("/static/flexband/js/socket.js");
    window.frames_seen = [];
    window.live = new LiveSocket(`ws://127.0.0.1:${port}/`);
    window.live.on("pool:chat", (state, meta) => window.frames_seen.push([state, meta.epoch, meta.seq]));
    window.live.open();
}"""


class Peer:
    """Accepts one browser at a time; tests send frames and read what it asked for."""

    def __init__(self):
        self.asked: list[list[str]] = []
        self.connection = None
        self.connections = 0
        self.server = serve(self._talk, "127.0.0.1", 0)
        self.port = self.server.socket.getsockname()[1]
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def _talk(self, connection):
        self.connection = connection
        self.connections += 1
        try:
            for message in connection:
                self.asked.append(json.loads(message)["subscribe"])
        except ConnectionClosed:
            pass

    def frame(self, kind, seq, data, epoch=7, topic="pool:chat"):
        at = datetime.now(UTC).isoformat()
        self.connection.send(
            json.dumps({"type": kind, "topic": topic, "epoch": epoch, "seq": seq, "at": at, "data": data})
        )

    def wait_asked(self, count):
        until = time.monotonic() + 60
        while len(self.asked) < count and time.monotonic() < until:
            time.sleep(0.02)
        assert len(self.asked) == count, self.asked


@pytest.fixture
def peer():
    one = Peer()
    yield one
    one.server.shutdown()


@pytest.fixture
def live_page(open_page, peer):
    # The policy allows the page's own origin only; the scripted peer listens on another port.
    page = open_page(bypass_csp=True)
    page.evaluate(START, peer.port)
    peer.wait_asked(1)
    return page


def seen(page, count):
    page.wait_for_function(f"window.frames_seen.length >= {count}", timeout=60_000)
    return page.evaluate("window.frames_seen")


def test_snapshot_then_deltas_merge_by_top_level_key(live_page, peer):
    assert peer.asked == [["pool:chat"]]
    peer.frame("snapshot", 3, {"depth": 1, "by": {"a": 1, "b": 2}})
    peer.frame("delta", 4, {"by": {"a": 5}})
    assert seen(live_page, 2) == [
        [{"depth": 1, "by": {"a": 1, "b": 2}}, 7, 3],
        [{"depth": 1, "by": {"a": 5}}, 7, 4],
    ]


def test_a_gap_asks_for_a_snapshot_once_and_shows_nothing_until_it_came(live_page, peer):
    peer.frame("snapshot", 1, {"depth": 1})
    seen(live_page, 1)
    peer.frame("delta", 3, {"depth": 99})
    peer.frame("delta", 4, {"depth": 100})
    peer.wait_asked(2)
    time.sleep(0.2)
    assert len(peer.asked) == 2
    assert len(seen(live_page, 1)) == 1
    peer.frame("snapshot", 9, {"depth": 4})
    assert seen(live_page, 2)[-1] == [{"depth": 4}, 7, 9]


def test_a_delta_of_another_epoch_is_a_gap_and_an_old_one_is_dropped(live_page, peer):
    peer.frame("snapshot", 5, {"depth": 1})
    peer.frame("delta", 5, {"depth": 98})
    peer.frame("delta", 4, {"depth": 97})
    peer.frame("delta", 6, {"depth": 2})
    assert seen(live_page, 2)[-1] == [{"depth": 2}, 7, 6]
    assert len(peer.asked) == 1
    peer.frame("delta", 7, {"depth": 96}, epoch=8)
    peer.wait_asked(2)
    assert len(seen(live_page, 2)) == 2


def test_a_lost_connection_is_a_banner_after_three_seconds_and_comes_back(live_page, peer):
    peer.frame("snapshot", 1, {"depth": 1})
    seen(live_page, 1)
    port = peer.port
    peer.server.shutdown()
    closed = time.monotonic()
    peer.connection.close()
    banner = live_page.locator("#connection-banner")
    time.sleep(1)
    assert not banner.is_visible() or time.monotonic() - closed > 2.9, "three seconds had passed on a busy machine"
    banner.wait_for(state="visible", timeout=60_000)
    assert "Connection lost, trying again. Last update" in banner.inner_text()
    back = serve(peer._talk, "127.0.0.1", port)
    threading.Thread(target=back.serve_forever, daemon=True).start()
    try:
        peer.wait_asked(2)
        peer.frame("snapshot", 1, {"depth": 5}, epoch=9)
        assert seen(live_page, 2)[-1] == [{"depth": 5}, 9, 1]
        assert not banner.is_visible()
    finally:
        back.shutdown()


def test_pause_keeps_the_page_still_and_resume_shows_the_latest(live_page, peer):
    peer.frame("snapshot", 1, {"depth": 1})
    seen(live_page, 1)
    button = live_page.locator("[data-pause-live]")
    button.click()
    assert button.inner_text() == "Resume"
    peer.frame("delta", 2, {"depth": 2})
    peer.frame("delta", 3, {"depth": 3})
    time.sleep(0.3)
    assert len(seen(live_page, 1)) == 1
    button.click()
    assert seen(live_page, 2)[-1] == [{"depth": 3}, 7, 3]
    assert len(seen(live_page, 2)) == 2


def test_a_refused_topic_is_said(live_page, peer):
    peer.connection.send(json.dumps({"type": "error", "topic": "pool:chat", "detail": "not yours to see"}))
    live_page.locator(".toast").wait_for()
    assert live_page.locator(".toast").inner_text() == "pool:chat: not yours to see"


def test_the_policy_lets_the_page_reach_its_own_socket_only(open_page, peer, site):
    page = open_page()
    blocked = """(url) => new Promise((resolve) => {
        addEventListener("securitypolicyviolation", (event) => resolve(event.violatedDirective), { once: true });
        try { new WebSocket(url); } catch { resolve("connect-src"); }
        setTimeout(() => resolve("allowed"), 700);
    })"""
    own = site.replace("http:", "ws:") + "/ws/live/"
    assert page.evaluate(blocked, own) == "allowed"
    assert page.evaluate(blocked, f"ws://127.0.0.1:{peer.port}/") == "connect-src"
