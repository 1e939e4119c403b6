"""Turns that go on at another engine before their first byte, over real sockets."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import UNSET

from engine.protocol import Done, ErrorCode, ErrorReply, Finished, TextDelta
from gateway.routing.breaker import FAILURES
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.scripted_engine import Script, ScriptedEngine
from tests.gateway.serving import HEADERS, ask, eventually, metric, serve, serve_gateway


@dataclass
class Pair:
    """A gateway in front of two scripted engines; `engine-0` is the first."""

    url: str
    first: ScriptedEngine
    second: ScriptedEngine
    first_url: str

    @property
    def admin(self) -> Admin:
        return Admin(self.url)

    def ask(self, text: str, path: str = "messages", **changes: Any) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return ask(self.url, f"/v1/{path}", messages=messages, **changes)

    def ask_until(self, engine: ScriptedEngine, name: str, **changes: Any) -> httpx.Response:
        """Ask new things until one of them was sent to this engine first; return its answer."""
        replies = list[httpx.Response]()

        def goes_there() -> bool:
            before = len(engine.requests) + len(engine.refused)
            replies.append(self.ask(f"{name} {len(replies)}", **changes))
            return len(engine.requests) + len(engine.refused) > before

        eventually(goes_there)  # an engine may be away for a moment on a busy machine
        return replies[-1]

    def engine(self, name: str) -> dict[str, Any]:
        return next(engine for engine in self.admin.get("engines") if engine["name"] == name)

    def metric(self, line: str) -> float:
        return metric(self.url, line)

    def settles(self, request: str) -> None:
        """Both engines are told that their counts are settled."""
        eventually(lambda: request in self.first.acked and f"{request}.2" in self.second.acked)

    def turn(self, turn_id: str) -> dict[str, Any]:
        rows: list[dict[str, Any]] = []

        def look() -> bool:
            rows[:] = [t for t in self.admin.get("turns") if t["id"] == turn_id]
            return bool(rows)

        eventually(look)
        assert len(rows) == 1
        return rows[0]


@contextmanager
def serving(data: Path, **settings: Any) -> Iterator[Pair]:
    first = ScriptedEngine()
    second = ScriptedEngine(epoch="epoch-2")
    with (
        serve(first) as first_url,
        serve(second) as second_url,
        serve_gateway(data, first_url, second_url, **settings) as url,
    ):
        yield Pair(url, first, second, first_url)


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[Pair]:
    with serving(tmp_path) as running_pair:
        yield running_pair


def test_an_engine_that_breaks_before_its_first_frame_is_not_noticed(pair: Pair) -> None:
    pair.first.breaks_early = True
    pair.first.num_heartbeats = 1
    for number, stream in enumerate([False, True], 1):
        reply = pair.ask_until(pair.first, f"breaks {stream}", stream=stream)
        assert reply.status_code == 200
        assert "Hello" in reply.text and '"error"' not in reply.text
        request = pair.first.requests[-1].request_id
        assert pair.second.requests[-1].request_id == f"{request}.2"
        row = pair.turn(request)
        assert (row["engine"], row["outcome"], row["output_tokens"]) == ("engine-1", "stop", 2)
        pair.settles(request)
        retried = 'holdfast_gateway_reconciled_turns_total{result="retried"}'
        eventually(lambda name=retried, number=number: pair.metric(name) == number)
        assert pair.metric('holdfast_gateway_retries_total{reason="lost"}') == number
        assert '"engine":"engine-1"' in reply.text


def test_a_turn_that_ends_engines_reaches_two_of_them(tmp_path: Path) -> None:
    engines = [ScriptedEngine(breaks_early=True) for _ in range(4)]
    with ExitStack() as stack:
        urls = [stack.enter_context(serve(engine)) for engine in engines]
        url = stack.enter_context(serve_gateway(tmp_path, *urls))
        # The head of a stream has gone out by then.
        for number, (stream, status) in enumerate([(False, 529), (True, 200)], 1):
            reply = Pair(url, *engines[:2], urls[0]).ask(f"ends them {stream}", stream=stream)
            assert reply.status_code == status
            assert "overloaded_error" in reply.text
            assert sum(len(engine.requests) for engine in engines) == 2 * number


def test_nobody_waits_for_the_next_start_of_vllm(tmp_path: Path) -> None:
    engine = ScriptedEngine(backend="vllm")
    with ExitStack() as server, ExitStack() as gateway:
        engine_url = server.enter_context(serve(engine))
        url = gateway.enter_context(serve_gateway(tmp_path, engine_url, queue_seconds=120))
        fleet = Pair(url, engine, engine, engine_url)
        assert fleet.ask("Hi").status_code == 200
        server.close()
        begun = time.monotonic()
        assert fleet.ask("Hi").status_code == 529
        assert time.monotonic() - begun < 60


def test_an_engine_that_is_full_or_fails_by_its_own_doing_passes_its_turn_on(pair: Pair) -> None:
    # An engine that comes after turns of its peer's begins with the peer's load.
    eventually(lambda: all(engine["status"] == "ready" for engine in pair.admin.get("engines")))
    codes: list[ErrorCode] = ["overloaded", "not_ready", "internal"]
    for code in codes:
        pair.first.refusal = ErrorReply(code, "no")
        reply = pair.ask_until(pair.first, code)
        assert reply.status_code == 200
        assert pair.turn(reply.json()["id"])["engine"] == "engine-1"
        if code != "internal":
            assert pair.engine("engine-0")["breaker"] == "closed", "a refusal is an answer"
            assert pair.engine("engine-0")["routing"]["recent_tokens"] == 0
    assert pair.metric('holdfast_gateway_retries_total{reason="failed"}') == 1


PATHS = (("messages", 529), ("chat/completions", 503))


def test_when_all_are_full_and_none_may_wait_each_was_asked_once(tmp_path: Path) -> None:
    with serving(tmp_path, queue_seconds=0.0) as pair:
        pair.first.refusal = pair.second.refusal = ErrorReply("overloaded", "no")
        for number, (path, status) in enumerate(PATHS, 1):
            reply = pair.ask(path, path=path)
            assert reply.status_code == status
            assert 1 <= int(reply.headers["retry-after"]) <= 60
            assert len(pair.first.refused) == len(pair.second.refused) == number
        assert {engine["routing"]["running"] for engine in pair.admin.get("engines")} == {0}


def test_a_turn_that_every_engine_refused_waits_until_one_takes_it(pair: Pair) -> None:
    pair.first.refusal = pair.second.refusal = ErrorReply("overloaded", "no")
    with ThreadPoolExecutor() as pool:
        future = pool.submit(pair.ask, "p")
        eventually(lambda: pair.metric("holdfast_gateway_waiting_turns") == 1)
        pair.second.refusal = None
        assert future.result(180).status_code == 200
    assert pair.metric("holdfast_gateway_waiting_turns") == 0
    assert pair.metric("holdfast_gateway_waited_seconds_count") >= 1
    assert pair.engine("engine-1")["breaker"] == "closed"


def test_an_engine_that_puts_a_turn_off_takes_others_meanwhile(tmp_path: Path) -> None:
    """A workspace whose schemas waited to be compiled made an engine look full to everybody."""
    with serving(tmp_path) as pair:
        pair.second.refusal = ErrorReply("not_ready", "it starts")
        pair.first.refusal = ErrorReply("overloaded", "no worker was free", only_this=True)
        pair.first.refuses = b"put off"
        with ThreadPoolExecutor() as pool:
            future = pool.submit(pair.ask, "put off")
            eventually(lambda: len(pair.first.refused) > 1)
            pair.first.refused.clear()
            for number in range(100):
                assert pair.ask(f"q{number}").status_code == 200
                if pair.first.refused:
                    break
            assert number > 0
            pair.first.refusal = None
            assert future.result(180).status_code == 200
        assert pair.engine("engine-0")["breaker"] == "closed"


def test_what_the_prompt_is_to_blame_for_and_what_began_is_not_tried_elsewhere(pair: Pair) -> None:
    for reply in (
        ErrorReply("prompt_too_long", "200 tokens > 100"),
        ErrorReply("too_costly", "takes too much to prepare: more than 8 seconds"),
    ):
        pair.first.refusal = pair.second.refusal = reply
        answer = pair.ask(reply.code)
        assert answer.status_code == 400
    assert "take too long to prepare" in answer.text
    assert len(pair.first.refused) + len(pair.second.refused) == 2
    for engine in (pair.first, pair.second):
        engine.refusal = None
        engine.script = lambda *_: [TextDelta("Hel"), 3.0, b""]
    streamed = pair.ask("p", stream=True)
    assert streamed.status_code == 200
    assert "Hel" in streamed.text and "event: error" in streamed.text
    assert len(pair.first.requests) + len(pair.second.requests) == 1
    pair.first.is_ready = pair.second.is_ready = False
    eventually(lambda: {e["status"] for e in pair.admin.get("engines")} == {"starting"})
    for path, status in PATHS:
        away = pair.ask("p", path=path)
        assert away.status_code == status and away.headers["retry-after"] == "5"
        assert "no engine is ready" in away.json()["error"]["message"]


def test_an_answer_in_one_piece_begins_anew_until_it_is_whole(pair: Pair) -> None:
    """What the first engine had begun to say is neither in the answer nor on the bill."""
    pair.first.script = lambda _request, _usage: [TextDelta("Half"), b""]
    for path, _ in PATHS:
        reply = pair.ask_until(pair.first, path, path=path)
        assert reply.status_code == 200
        assert "Hello there" in reply.text and "Half" not in reply.text
        request = pair.first.requests[-1].request_id
        assert pair.second.requests[-1].request_id == f"{request}.2"
        row = pair.turn(request)
        assert (row["engine"], row["outcome"], row["output_tokens"]) == ("engine-1", "stop", 2)
        pair.settles(request)
    assert not [turn for turn in pair.admin.get("turns") if turn["outcome"] != "stop"]


def giving_up(code: ErrorCode | None) -> Script:
    """An answer that its engine ends after its first token."""
    end = Finished(reason="failed", output_tokens=1, code=code or UNSET)
    return lambda request, _: [
        TextDelta("Half"),
        end,
        Done(request_id=request.request_id, output_tokens=1),
    ]


def test_an_answer_that_its_engine_gives_up_begins_anew_elsewhere(pair: Pair) -> None:
    """As that of a vLLM does whose operator pauses it. Nothing is wrong with the engine."""
    pair.first.script = giving_up("not_ready")
    for number in range(FAILURES + 1):
        reply = pair.ask_until(pair.first, f"given up {number}")
        assert reply.status_code == 200
        assert "Hello there" in reply.text and "Half" not in reply.text
        request = pair.first.requests[-1].request_id
        row = pair.turn(request)
        assert (row["engine"], row["outcome"], row["output_tokens"]) == ("engine-1", "stop", 2)
        pair.settles(request)
    first = pair.engine("engine-0")
    assert (first["breaker"], first["times_opened"]) == ("closed", 0)


def test_an_answer_that_the_only_engine_gives_up_asks_for_another_try(tmp_path: Path) -> None:
    engine = ScriptedEngine(script=giving_up("not_ready"))
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        fleet = Pair(url, engine, engine, engine_url)
        for path, status in PATHS:
            whole = fleet.ask(path, path=path)
            assert whole.status_code == status and whole.headers["retry-after"] == "5"
            assert (
                whole.json()["error"]["message"]
                == "the engine aborted the answer before it was whole"
            )
            streamed = fleet.ask(path, path=path, stream=True)
            assert streamed.status_code == 200
            assert "Half" in streamed.text and "the engine aborted the answer" in streamed.text
        eventually(lambda: len(fleet.admin.get("turns")) == 2 * len(PATHS))
        for row in fleet.admin.get("turns"):
            assert (row["outcome"], row["output_tokens"]) == ("overloaded_error", 1)
            assert row["error"] == "the engine aborted the answer before it was whole"
        only = fleet.engine("engine-0")
        assert (only["breaker"], only["times_opened"]) == ("closed", 0)


def test_an_engine_whose_answers_break_off_is_suspected_and_passes_them_on(pair: Pair) -> None:
    """It named no cause, or one of its own: that is a breakdown."""
    codes: list[ErrorCode | None] = [None, "internal"]
    for number in range(FAILURES):
        pair.first.script = giving_up(codes[number % len(codes)])
        reply = pair.ask_until(pair.first, f"breaks off {number}")
        assert reply.status_code == 200 and "Hello there" in reply.text
    assert pair.engine("engine-0")["times_opened"] == 1


def test_the_breaker_opens_lets_a_probe_through_and_closes_for_a_new_process(pair: Pair) -> None:
    pair.first.breaks_early = True
    for number in range(FAILURES):
        assert pair.ask_until(pair.first, f"breaks {number}").status_code == 200
    state = pair.engine("engine-0")
    assert state["times_opened"] == 1 and state["breaker"] in ("open", "half_open")
    assert pair.metric('holdfast_gateway_engine_breaker{engine="engine-0"}') > 0
    pair.first.breaks_early = False

    def is_closed() -> bool:
        assert pair.ask_until(pair.first, "probe").status_code == 200
        return bool(pair.engine("engine-0")["breaker"] == "closed")

    eventually(lambda: pair.engine("engine-0")["breaker"] == "half_open")
    eventually(is_closed)
    pair.first.breaks_early = True
    for number in range(FAILURES):
        pair.ask_until(pair.first, f"breaks again {number}")
    pair.first.breaks_early = False
    pair.first.epoch = "epoch-2"
    eventually(lambda: pair.engine("engine-0")["description"]["epoch"] == "epoch-2")
    assert pair.engine("engine-0")["breaker"] == "closed"
    # A new process begins with its peer's load.
    recent = [pair.engine(name)["routing"]["recent_tokens"] for name in ("engine-0", "engine-1")]
    assert recent[0] == pytest.approx(recent[1], rel=0.2, abs=5)


def test_an_engine_is_drained_resumed_removed_and_added(pair: Pair) -> None:
    assert pair.admin.post("engines/engine-0/drain")["is_draining"] is True
    for number in range(12):
        assert pair.ask(f"drained {number}").status_code == 200
    assert not pair.first.requests
    assert pair.admin.post("engines/engine-0/resume")["is_draining"] is False
    pair.ask_until(pair.first, "resumed")

    eventually(lambda: pair.engine("engine-0")["routing"]["running"] == 0)
    pair.admin.delete("engines/engine-0")
    pair.admin.delete("engines/engine-0", 404)
    pair.first.requests.clear()
    for number in range(12):
        assert pair.ask(f"removed {number}").status_code == 200
    assert not pair.first.requests
    assert [engine["name"] for engine in pair.admin.get("engines")] == ["engine-1"]

    assert pair.admin.post("engines", {"url": pair.first_url + "/"})["name"] == "engine-0"
    pair.ask_until(pair.first, "added")


def test_what_can_not_be_done_to_engines_is_said(pair: Pair) -> None:
    for engine in (pair.first, pair.second):
        engine.wait_seconds = 60.0
    url = f"{pair.url}/v1/messages"
    request = body(stream=True)
    with httpx.stream("POST", url, json=request, headers=HEADERS, timeout=120):
        name = "engine-0" if pair.first.requests else "engine-1"
        reply = pair.admin.delete(f"engines/{name}", 400)
        assert "turns run there" in reply["error"]["message"]
    pair.admin.post("engines/engine-9/drain", status=404)
    for entry, reason in (
        ({"url": pair.first_url}, "url: this engine is there already"),
        ({}, "url: field required"),
        ({"url": "http://e", "name": "x"}, "name: unknown field"),
    ):
        assert reason in pair.admin.post("engines", entry, 400)["error"]["message"]
