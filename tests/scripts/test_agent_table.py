"""The table of agents: what counts as a turn, as read and as a refusal."""

import json
import urllib.error
import urllib.request
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest

from scripts.stack import HOST
from tests.agents.recipes import CLAUDE_CODE, CLAUDE_CONTINUE, LAST_TEXT
from tests.agents.relay import Exchange, relaying
from tests.agents.run import execute, judge, script_of


def exchange(
    name: str, *, has_tools: bool = True, status: int = 200, path: str = "/v1/x"
) -> Exchange:
    body = json.dumps({"tools": [{"name": "Bash"}] if has_tools else []}).encode()
    return Exchange("POST", path, status, body, bytearray(f'{{"id":"resp_{name}"}}'.encode()))


def row(name: str, *, new: int, read: int) -> dict[str, object]:
    return {
        "id": f"msg_{name}",
        "input_tokens": new,
        "cache_read_tokens": read,
        "cache_write_5m_tokens": 0,
        "cache_write_1h_tokens": 0,
    }


ROWS = [row("a0", new=100, read=0), *(row(f"a{n}", new=10, read=90) for n in range(1, 5))]
EXCHANGES = [exchange(f"a{n}") for n in range(5)]


def test_the_share_leaves_out_the_first_turn_and_turns_without_tools() -> None:
    title = [exchange("b0", has_tools=False)]
    rows = [*ROWS, row("b0", new=1000, read=0)]
    found = judge(CLAUDE_CODE, "1", [*EXCHANGES, *title], rows, 0, LAST_TEXT)
    assert (found.turns, found.beside, found.share) == (5, 1, 0.9)
    assert found.is_good


def test_a_refusal_is_told_by_its_path_and_is_not_good() -> None:
    refused = exchange("", status=400, path="/v1/messages")
    found = judge(CLAUDE_CODE, "1", [refused, *EXCHANGES], ROWS, 0, LAST_TEXT)
    assert "| 1: 400 /v1/messages |" in found.line
    assert not found.is_good


@pytest.mark.parametrize(
    ("status", "printed", "turns"), [(1, LAST_TEXT, 5), (0, "", 5), (0, LAST_TEXT, 4)]
)
def test_a_client_that_fails_or_stops_early_has_not_come_to_its_end(
    status: int, printed: str, turns: int
) -> None:
    found = judge(CLAUDE_CODE, "1", EXCHANGES[:turns], ROWS[:turns], status, printed)
    assert "**did not end**" in found.line


def test_a_conversation_of_two_runs_has_a_last_text_in_each() -> None:
    script = script_of(CLAUDE_CONTINUE)
    assert [turn for turn, text in script.items() if text == LAST_TEXT] == ["turn 2", "turn 5"]
    once = judge(CLAUDE_CONTINUE, "1", EXCHANGES, ROWS, 0, LAST_TEXT)
    assert not once.has_ended_well
    assert judge(CLAUDE_CONTINUE, "1", EXCHANGES, ROWS, 0, LAST_TEXT * 2).has_ended_well


def test_what_a_client_left_running_is_ended_also_when_it_failed(tmp_path: Path) -> None:
    note = ("sh", "-c", 'echo "$$1" >> $work/notes', "sh")
    recipe = replace(
        CLAUDE_CODE,
        before=(*note, "before"),
        command=("false",),
        resumed=((*note, "resumed"),),
        after=(*note, "after"),
    )
    status, _ = execute(recipe, tmp_path, tmp_path, "http://nowhere")
    assert status == 1
    assert (tmp_path / "work" / "notes").read_text().split() == ["before", "after"]


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(418)
        self.send_header("x-seen", self.headers["x-mine"])
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


def test_the_relay_passes_a_request_and_its_refusal_unchanged() -> None:
    server = ThreadingHTTPServer((HOST, 0), Refusing)
    Thread(target=server.serve_forever, daemon=True).start()
    sent = json.dumps({"tools": [{}]}).encode()
    with relaying(f"http://{HOST}:{server.server_port}") as relay:
        asked = urllib.request.Request(f"{relay.url}/a?b=%2F", sent, {"x-mine": "yes"})
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with pytest.raises(urllib.error.HTTPError) as refused:
            opener.open(asked, timeout=60)
        assert (refused.value.code, refused.value.headers["x-seen"]) == (418, "yes")
        assert refused.value.read() == sent
        [one] = relay.exchanges
    server.shutdown()
    server.server_close()
    assert (one.path, one.status, one.is_refused, one.has_tools) == ("/a", 418, True, True)
