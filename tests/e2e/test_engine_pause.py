"""The only engine stands still for six seconds (SIGSTOP): turns wait for it, whenever they came.

An engine that misses its polls is `unsure` first. It is down when that has lasted, or when it
refuses connections.
"""

import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.e2e.fleet import Fleet, running_fleet
from tests.gateway.serving import WAIT_SECONDS, eventually

PAUSE_SECONDS = 6.0
SAID = [{"role": "user", "content": "Are you there?"}]


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with running_fleet(tmp_path_factory.mktemp("pair")) as fleet:
        yield fleet


@pytest.fixture
def pair(shared: Fleet) -> Fleet:
    """The module's servers, which have recovered from the pause before."""
    eventually(lambda: status_of(shared) == "ready")
    return shared


def status_of(fleet: Fleet) -> str:
    (engine,) = httpx.get(f"{fleet.gateway.url}/readyz", timeout=120).json()["engines"]
    return str(engine["status"])


@contextmanager
def standing_still(fleet: Fleet) -> Iterator[None]:
    fleet.processes[0].send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        fleet.processes[0].send_signal(signal.SIGCONT)


def ask(fleet: Fleet, text: str = "Are you there?") -> httpx.Response:
    return fleet.gateway.ask([], text, max_tokens=2)


def test_turns_that_come_while_the_only_engine_stands_still_are_all_served(pair: Fleet) -> None:
    def send(at: float, began: float) -> int:
        time.sleep(max(0.0, began + at - time.monotonic()))
        return ask(pair).status_code

    with ThreadPoolExecutor() as pool:
        with standing_still(pair):
            began = time.monotonic()
            statuses = set()
            futures = [pool.submit(send, at, began) for at in (0.2, 2.0, 4.5)]
            # A busy gateway may take longer than the pause to notice.
            while time.monotonic() < began + PAUSE_SECONDS or "unsure" not in statuses:
                assert time.monotonic() < began + WAIT_SECONDS, "the gateway does not notice"
                statuses.add(status_of(pair))
                ready = httpx.get(f"{pair.gateway.url}/readyz", timeout=120)
                assert ready.status_code == 200, "turns are taken"
                time.sleep(0.2)
        assert [status.result() for status in futures] == [200] * 3
    assert "unsure" in statuses and "down" not in statuses


def test_a_count_that_comes_while_the_only_engine_is_unsure_waits_for_it(pair: Fleet) -> None:
    stop = pair.processes[0].send_signal
    stop(signal.SIGSTOP)
    try:
        eventually(lambda: status_of(pair) == "unsure")
    finally:
        resume = threading.Timer(2.0, stop, [signal.SIGCONT])
        resume.start()
    reply = pair.gateway.send("/v1/messages/count_tokens", messages=SAID)
    resume.join()
    assert reply.status_code == 200, reply.text


def test_a_slow_answer_to_the_admin_api_takes_no_engine_out(pair: Fleet) -> None:
    with standing_still(pair):
        (engine,) = pair.gateway.get("engines")
        assert engine["stats"] is None and engine["status"] != "down"
    eventually(lambda: status_of(pair) == "ready")


def test_a_hung_engine_costs_no_turn_and_one_that_ended_is_down(tmp_path: Path) -> None:
    with running_fleet(tmp_path, 2) as fleet:
        engines = set[str]()

        def send(number: int) -> int:
            reply = ask(fleet, f"Number {number}")
            if reply.status_code == 200:
                engines.add(reply.json()["holdfast"]["engine"])
            return reply.status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(send, range(40))) == {200}
            assert len(engines) == 2, "both take turns"
            with standing_still(fleet):
                assert set(pool.map(send, range(40, 120))) == {200}
        for number in range(2):
            fleet.kill(number)
        eventually(
            lambda: {engine["status"] for engine in fleet.gateway.get("engines")} == {"down"}
        )
        assert ask(fleet).status_code == 529
