"""`kill -9` of the only engine while turns wait for their first token.

They go on at its next process. Where none comes in the queue's time, the client is told to come
again.
"""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.kills import CLASSES, counted, sums
from tests.gateway.serving import eventually

QUICK = {"ENGINE_MIN_CACHE_TOKENS": "64", "ENGINE_SYNTHETIC_PREFILL_US": "100"}
SLOW = {**QUICK, "ENGINE_SYNTHETIC_PREFILL_US": "60000", "ENGINE_MAX_STEP_TOKENS": "16"}
"""No prompt is computed before its engine is killed, however busy the machine is.

It takes half a minute, in steps of a second."""
SYSTEM = "A rule that holds. " * 100
WAIT_SECONDS = 120.0
SENT_SECONDS = 1.5
"""After so long a count has gone to a stopped engine, and no poll has given that one up."""
KINDS = [(path, stream) for stream in (True, False) for path in ("messages", "chat/completions")]


def begun(
    fleet: Fleet, pool: ThreadPoolExecutor, kinds: list[tuple[str, bool]]
) -> list[Future[httpx.Response]]:
    """Turns of these dialects, streamed or in one piece, that wait for their first token."""

    def ask(path: str, stream: bool) -> httpx.Response:
        gateway = fleet.gateway
        question = f"{path} {stream}"
        if path == "messages":
            return gateway.ask(f"{question} {SYSTEM}", question, stream=stream)
        messages = [{"role": "system", "content": f"{question} {SYSTEM}"}]
        messages.append({"role": "user", "content": question})
        return gateway.send(f"/v1/{path}", messages=messages, stream=stream, max_tokens=4)

    futures = [pool.submit(ask, *kind) for kind in kinds]
    eventually(lambda: at_engine(fleet) == len(futures))
    return futures


def at_engine(fleet: Fleet) -> int:
    """The turns that the engine has."""
    stats = fleet.stats()
    return int(stats["running"] + stats["waiting"])


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("lost"), settings=SLOW) as fleet:
        yield fleet


@pytest.fixture
def fleet(shared: Fleet) -> Fleet:
    """The module's, its engine a new and slow one."""
    shared.kill()
    shared.restart()
    eventually(lambda: shared.num_ready() == 1)
    return shared


def new_rows(fleet: Fleet, before: list[dict[str, Any]]) -> list[dict[str, Any]]:
    known = {row["id"] for row in before}
    return [row for row in fleet.gateway.rows() if row["id"] not in known]


def test_turns_cut_before_their_first_byte_go_on_at_the_engines_next_process(fleet: Fleet) -> None:
    with ThreadPoolExecutor() as pool:
        before = fleet.gateway.rows()
        futures = begun(fleet, pool, KINDS)
        fleet.kill()
        fleet.restart(0, QUICK)
        for reply in (future.result(WAIT_SECONDS) for future in futures):
            assert reply.status_code == 200, reply.text
            assert '"error"' not in reply.text and "event: error" not in reply.text
        rows = new_rows(fleet, before)
        eventually(lambda: fleet.stats()["unacknowledged"] == 0)
        stats = fleet.stats()
    assert len(rows) == len(futures)
    assert {(row["outcome"], row["epoch"]) for row in rows} == {("length", stats["epoch"])}
    assert sums(rows) == counted(stats)


def test_turns_of_an_engine_that_stays_away_are_told_to_come_again(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, 1, 1, SLOW, {"HOLDFAST_QUEUE_SECONDS": "5"}) as fleet,
        ThreadPoolExecutor() as pool,
    ):
        futures = begun(fleet, pool, KINDS)
        fleet.kill()
        message_stream, chat_stream, message, chat = (
            future.result(WAIT_SECONDS) for future in futures
        )
        assert (message.status_code, chat.status_code) == (529, 503)
        for reply in (message, chat):
            assert int(reply.headers["retry-after"]) > 0
            assert "connection to the engine was lost" in reply.json()["error"]["message"]
        # The engine had accepted these, so their heads had gone out.
        assert "overloaded_error" in message_stream.text and '"error"' in chat_stream.text
        fleet.restart(0, QUICK)
        rows = fleet.gateway.rows()
    assert [row["outcome"] for row in rows] == ["overloaded_error"] * 4
    assert sums(rows) == dict.fromkeys(CLASSES, 0)


def test_a_count_that_is_cut_goes_on_at_the_engines_next_process(fleet: Fleet) -> None:
    def count() -> httpx.Response:
        messages = [{"role": "user", "content": "How long?"}]
        return fleet.gateway.send("/v1/messages/count_tokens", messages=messages)

    before = count()
    with ThreadPoolExecutor() as pool:
        fleet.processes[0].send_signal(signal.SIGSTOP)
        future = pool.submit(count)
        time.sleep(SENT_SECONDS)
        fleet.kill()
        fleet.restart()
        assert future.result(WAIT_SECONDS).json() == before.json()


def test_a_turn_that_ends_every_process_it_is_sent_to_is_sent_twice(fleet: Fleet) -> None:
    """One is streamed, the other is not."""
    before = fleet.gateway.rows()
    with ThreadPoolExecutor() as pool:
        futures = begun(fleet, pool, [("messages", True), ("messages", False)])
        for _ in range(2):
            eventually(lambda: at_engine(fleet) == 2)
            fleet.kill()
            fleet.restart()
        streamed, whole = (future.result(WAIT_SECONDS) for future in futures)
    assert (streamed.status_code, whole.status_code) == (200, 529)
    assert "overloaded_error" in streamed.text and "overloaded_error" in whole.text
    assert [row["outcome"] for row in new_rows(fleet, before)] == ["overloaded_error"] * 2
