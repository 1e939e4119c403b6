"""`kill -9` of the only engine while turns wait for their first token.

They go on at its next process. Where none comes in the queue's time, the client is told to come
again.
"""

import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench.load import body_of
from scripts.stack import API_HEADERS, API_KEY
from tests.e2e.fleet import Fleet, running_fleet
from tests.e2e.kills import CLASSES, backlog
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually

QUICK = {
    "ENGINE_MIN_CACHE_TOKENS": "64",
    "ENGINE_SYNTHETIC_PREFILL_US": "100",
    "ENGINE_LOG_LEVEL": "error",
}
SLOW = {**QUICK, "ENGINE_SYNTHETIC_PREFILL_US": "60000", "ENGINE_MAX_STEP_TOKENS": "16"}
"""No prompt is computed before its engine is killed, however busy the machine is.

It takes half a minute, in steps of a second."""
GATEWAY = {"HOLDFAST_LOG_LEVEL": "error"}
SYSTEM = "A rule that holds. " * 100
WAIT_SECONDS = 120.0
SENT_SECONDS = 1.5
"""After so long a count has gone to a stopped engine, and no poll has given that one up."""


class Asking:
    """Turns of both dialects, streamed and in one piece, that wait for their first token."""

    def __init__(self, fleet: Fleet, pool: ThreadPoolExecutor) -> None:
        self._fleet = fleet
        url = fleet.gateways[0].url
        asks: list[Callable[[], httpx.Response]] = [
            lambda stream=stream, path=path: post(url, path, stream)  # type: ignore[misc]
            for stream in (True, False)
            for path in ("messages", "chat/completions")
        ]
        self.answers: list[Future[httpx.Response]] = [pool.submit(ask) for ask in asks]
        eventually(lambda: at_engine(fleet) == len(asks), WAIT_SECONDS)

    def replies(self) -> list[httpx.Response]:
        return [answer.result(WAIT_SECONDS) for answer in self.answers]


def at_engine(fleet: Fleet) -> int:
    """The turns that the engine has."""
    stats = fleet.stats(0)
    return int(stats["running"] + stats["waiting"])


def post(url: str, path: str, stream: bool) -> httpx.Response:
    question = f"{path} {stream}"
    body = body_of("synthetic", f"{question} {SYSTEM}", question, stream=stream, max_tokens=4)
    headers = API_HEADERS
    if path != "messages":
        system, *rest = body.pop("system"), *body["messages"]
        body["messages"] = [{"role": "system", "content": system[0]["text"]}, *rest]
        headers = {"authorization": f"Bearer {API_KEY}"}
    return httpx.post(f"{url}/v1/{path}", json=body, headers=headers, timeout=WAIT_SECONDS)


def rows(data: Path, fleet: Fleet) -> list[dict[str, Any]]:
    """The ledger's turns, once all are in it."""
    eventually(lambda: backlog(fleet.gateways[0].url) == 0, WAIT_SECONDS)
    return ledger_rows(f"sqlite:///{data / 'gateway-0' / 'ledger.db'}")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Fleet, Path]]:
    data = tmp_path_factory.mktemp("lost")
    with running_fleet(data, 1, 1, SLOW, GATEWAY) as fleet:
        yield fleet, data


@pytest.fixture
def fleet(shared: tuple[Fleet, Path]) -> Fleet:
    """The module's, its engine a new and slow one."""
    running, _ = shared
    running.kill(0)
    running.restart(0)
    eventually(lambda: running.gateways[0].engine("engine-0")["status"] == "ready", WAIT_SECONDS)
    return running


def test_turns_cut_before_their_first_byte_go_on_at_the_engines_next_process(
    fleet: Fleet, shared: tuple[Fleet, Path]
) -> None:
    with ThreadPoolExecutor() as pool:
        before = {row["id"] for row in rows(shared[1], fleet)}
        asking = Asking(fleet, pool)
        fleet.kill(0)
        fleet.restart(0, QUICK)
        for reply in asking.replies():
            assert reply.status_code == 200, reply.text
            assert '"error"' not in reply.text and "event: error" not in reply.text
        found = [row for row in rows(shared[1], fleet) if row["id"] not in before]
        eventually(lambda: fleet.stats(0)["unacknowledged"] == 0, WAIT_SECONDS)
        stats = fleet.stats(0)
    assert len(found) == len(asking.answers)
    assert {(row["outcome"], row["epoch"]) for row in found} == {("length", stats["epoch"])}
    for name in CLASSES:
        assert sum(row[name] for row in found) == stats["counters"].get(name, 0), name


def test_turns_of_an_engine_that_stays_away_are_told_to_come_again(tmp_path: Path) -> None:
    with (
        running_fleet(tmp_path, 1, 1, SLOW, {**GATEWAY, "HOLDFAST_QUEUE_SECONDS": "5"}) as fleet,
        ThreadPoolExecutor() as pool,
    ):
        asking = Asking(fleet, pool)
        fleet.kill(0)
        message_stream, chat_stream, message, chat = asking.replies()
        assert (message.status_code, chat.status_code) == (529, 503)
        for reply in (message, chat):
            assert int(reply.headers["retry-after"]) > 0
            assert "connection to the engine was lost" in reply.json()["error"]["message"]
        # The engine had accepted these, so their heads had gone out.
        assert "overloaded_error" in message_stream.text and '"error"' in chat_stream.text
        fleet.restart(0, QUICK)
        found = rows(tmp_path, fleet)
    assert len(found) == 4
    assert {row["outcome"] for row in found} == {"overloaded_error"}
    assert sum(row[name] for row in found for name in CLASSES) == 0


def test_a_count_that_is_cut_goes_on_at_the_engines_next_process(fleet: Fleet) -> None:
    path = f"{fleet.gateways[0].url}/v1/messages/count_tokens"
    body = {"model": "synthetic", "messages": [{"role": "user", "content": "How long?"}]}

    def count() -> httpx.Response:
        return httpx.post(path, json=body, headers=API_HEADERS, timeout=WAIT_SECONDS)

    before = count()
    with ThreadPoolExecutor() as pool:
        fleet.processes[0].send_signal(signal.SIGSTOP)
        asked = pool.submit(count)
        time.sleep(SENT_SECONDS)
        fleet.kill(0)
        fleet.restart(0)
        assert asked.result(WAIT_SECONDS).json() == before.json()


def test_a_turn_that_ends_every_process_it_is_sent_to_is_sent_twice(
    fleet: Fleet, shared: tuple[Fleet, Path]
) -> None:
    """One is streamed, the other is not."""
    before = {row["id"] for row in rows(shared[1], fleet)}
    with ThreadPoolExecutor() as pool:
        url = fleet.gateways[0].url
        asked = [pool.submit(post, url, "messages", stream) for stream in (True, False)]
        for _ in range(2):
            eventually(lambda: at_engine(fleet) == 2, WAIT_SECONDS)
            fleet.kill(0)
            fleet.restart(0)
        streamed, whole = (each.result(WAIT_SECONDS) for each in asked)
    assert (streamed.status_code, whole.status_code) == (200, 529)
    assert "overloaded_error" in streamed.text and "overloaded_error" in whole.text
    found = [row["outcome"] for row in rows(shared[1], fleet) if row["id"] not in before]
    assert found == ["overloaded_error"] * 2
