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

from scripts.stack import ADMIN_KEY, API_KEY, Server, serving_engine, serving_gateway
from tests.gateway.serving import WAIT_SECONDS, eventually

PAUSE_SECONDS = 6.0
HEADERS = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}
BODY = {
    "model": "synthetic",
    "max_tokens": 2,
    "messages": [{"role": "user", "content": "Are you there?"}],
}


@contextmanager
def running_pair(data: Path) -> Iterator[tuple[Server, str]]:
    """An engine and the address of a gateway in front of it."""
    with (
        serving_engine("synthetic", {"ENGINE_LOG_LEVEL": "error"}) as engine,
        serving_gateway(data, [engine.url]) as gateway,
    ):
        engine.wait()
        gateway.wait()
        yield engine, gateway.url


@pytest.fixture(scope="module")
def shared_pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, str]]:
    with running_pair(tmp_path_factory.mktemp("pair")) as pair:
        yield pair


@pytest.fixture
def pair(shared_pair: tuple[Server, str]) -> tuple[Server, str]:
    """The module's servers, which have recovered from the pause before."""
    eventually(lambda: status_of(shared_pair[1]) == "ready")
    return shared_pair


def status_of(url: str) -> str:
    (engine,) = httpx.get(f"{url}/readyz", timeout=120).json()["engines"]
    return str(engine["status"])


def test_turns_that_come_while_the_only_engine_stands_still_are_all_served(
    pair: tuple[Server, str],
) -> None:
    engine, url = pair
    answers: dict[float, int] = {}

    def send(at: float, began: float) -> None:
        time.sleep(max(0.0, began + at - time.monotonic()))
        reply = httpx.post(f"{url}/v1/messages", json=BODY, headers=HEADERS, timeout=90)
        answers[at] = reply.status_code

    engine.process.send_signal(signal.SIGSTOP)
    began = time.monotonic()
    senders = [threading.Thread(target=send, args=(at, began)) for at in (0.2, 2.0, 4.5)]
    for sender in senders:
        sender.start()
    seen = set()
    # A busy gateway may take longer than the pause to notice.
    while time.monotonic() < began + PAUSE_SECONDS or "unsure" not in seen:
        assert time.monotonic() < began + WAIT_SECONDS, "the gateway does not notice"
        seen.add(status_of(url))
        assert httpx.get(f"{url}/readyz", timeout=120).status_code == 200, "turns are taken"
        time.sleep(0.2)
    engine.process.send_signal(signal.SIGCONT)
    for sender in senders:
        sender.join(90)
    assert answers == {0.2: 200, 2.0: 200, 4.5: 200}
    assert "unsure" in seen and "down" not in seen


def test_a_count_that_comes_while_the_only_engine_is_unsure_waits_for_it(
    pair: tuple[Server, str],
) -> None:
    engine, url = pair
    engine.process.send_signal(signal.SIGSTOP)
    try:
        eventually(lambda: status_of(url) == "unsure")
    finally:
        resume = threading.Timer(2.0, engine.process.send_signal, [signal.SIGCONT])
        resume.start()
    body = {name: BODY[name] for name in ("model", "messages")}
    reply = httpx.post(f"{url}/v1/messages/count_tokens", json=body, headers=HEADERS, timeout=90)
    resume.join()
    assert reply.status_code == 200, reply.text


def test_an_engine_that_ended_is_down_at_once_and_its_turns_are_refused(tmp_path: Path) -> None:
    with running_pair(tmp_path) as (engine, url):
        eventually(lambda: status_of(url) == "ready")
        engine.process.kill()
        engine.process.wait()
        eventually(lambda: status_of(url) == "down")
        reply = httpx.post(f"{url}/v1/messages", json=BODY, headers=HEADERS, timeout=90)
        assert reply.status_code == 529


def test_a_slow_answer_to_the_admin_api_takes_no_engine_out(pair: tuple[Server, str]) -> None:
    engine, url = pair
    engine.process.send_signal(signal.SIGSTOP)
    try:
        headers = {"x-api-key": ADMIN_KEY}
        (shown,) = httpx.get(f"{url}/admin/v1/engines", headers=headers, timeout=60).json()
        assert shown["stats"] is None and shown["status"] != "down"
    finally:
        engine.process.send_signal(signal.SIGCONT)
    eventually(lambda: status_of(url) == "ready")


def test_a_hung_engine_costs_no_turn_while_another_is_free(tmp_path: Path) -> None:
    with (
        serving_engine("synthetic", {"ENGINE_LOG_LEVEL": "error"}) as hung,
        serving_engine("synthetic", {"ENGINE_LOG_LEVEL": "error"}) as free,
        serving_gateway(tmp_path, [hung.url, free.url]) as gateway,
    ):
        url = [server.wait().url for server in (hung, free, gateway)][-1]
        engines = [set[str]()]

        def send(number: int) -> int:
            body = {**BODY, "messages": [{"role": "user", "content": f"Number {number}"}]}
            reply = httpx.post(f"{url}/v1/messages", json=body, headers=HEADERS, timeout=90)
            if reply.status_code == 200:
                engines[0].add(reply.json()["holdfast"]["engine"])
            return reply.status_code

        with ThreadPoolExecutor(8) as pool:
            assert set(pool.map(send, range(40))) == {200}
            assert len(engines[0]) == 2, "both take turns"
            hung.process.send_signal(signal.SIGSTOP)
            try:
                assert set(pool.map(send, range(40, 120))) == {200}
            finally:
                hung.process.send_signal(signal.SIGCONT)
