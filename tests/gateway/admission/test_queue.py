"""Turns that wait at the gateway while its engine is full, over real sockets."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, eventually, metric, serve, serve_gateway

# One that computes one turn at a time gets one more: it does not wait for the gateway.
NUM_PLACES = 2


@dataclass
class Served:
    url: str
    engine: ScriptedEngine
    pool: ThreadPoolExecutor

    @property
    def admin(self) -> Admin:
        return Admin(self.url)

    def ask(self, text: str, key: str = API_KEY, patience: float = 60) -> httpx.Response:
        return httpx.post(
            f"{self.url}/v1/messages",
            json=body(messages=[{"role": "user", "content": text}]),
            headers={"x-api-key": key, "anthropic-version": "2023-06-01"},
            timeout=httpx.Timeout(60, read=patience),
            trust_env=False,
        )

    def metric(self, name: str) -> float:
        return metric(self.url, name)

    @property
    def num_waiting(self) -> float:
        return self.metric("holdfast_gateway_waiting_turns ")

    def fill(self) -> None:
        """Have the engine busy with as many turns as it is given."""
        for number in range(NUM_PLACES):
            self.pool.submit(self.ask, f"first {number}")
        eventually(lambda: len(self.engine.running) == NUM_PLACES)


@contextmanager
def served(tmp_path: Path, engine: ScriptedEngine, **settings: Any) -> Iterator[Served]:
    with ExitStack() as stack:
        url = stack.enter_context(serve(engine))
        gateway = stack.enter_context(serve_gateway(tmp_path, url, **settings))
        pool = stack.enter_context(ThreadPoolExecutor(32))
        try:
            yield Served(gateway, engine, pool)
        finally:
            engine.holds = False


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    engine = ScriptedEngine(max_running=1)
    with served(tmp_path_factory.mktemp("queue"), engine) as running:
        yield running


@pytest.fixture
def full_gateway(shared: Served) -> Iterator[Served]:
    """An engine that is full and holds its turns."""
    eventually(lambda: httpx.get(f"{shared.url}/readyz", timeout=120).status_code == 200)
    shared.engine.requests.clear()
    shared.engine.holds = True
    shared.fill()
    yield shared
    shared.engine.holds = False
    shared.engine.is_ready = True
    eventually(lambda: not shared.engine.running and shared.num_waiting == 0)


def all_answered(*futures: Future[httpx.Response]) -> bool:
    return {reply.result(180).status_code for reply in futures} == {200}


def test_what_an_engine_cannot_run_waits_here_and_goes_on_when_it_can(full_gateway: Served) -> None:
    before = full_gateway.metric("holdfast_gateway_waited_seconds_count")
    futures = [full_gateway.pool.submit(full_gateway.ask, f"then {number}") for number in range(5)]
    eventually(lambda: full_gateway.num_waiting == 5)
    assert len(full_gateway.engine.requests) == NUM_PLACES
    assert len(full_gateway.admin.get("engines")) == 1
    full_gateway.engine.holds = False
    assert all_answered(*futures)
    assert full_gateway.num_waiting == 0
    assert full_gateway.metric("holdfast_gateway_waited_seconds_count") == before + 5


def test_who_hangs_up_leaves_at_once_and_leaves_no_row(full_gateway: Served) -> None:
    with pytest.raises(httpx.ReadTimeout):
        full_gateway.ask("gone", patience=1)
    eventually(lambda: full_gateway.num_waiting == 0)
    eventually(lambda: full_gateway.metric("holdfast_gateway_journal_backlog ") == NUM_PLACES)
    assert len(full_gateway.engine.requests) == NUM_PLACES


def test_an_engine_that_goes_away_sets_free_who_waits_for_it(full_gateway: Served) -> None:
    future = full_gateway.pool.submit(full_gateway.ask, "waits")
    eventually(lambda: full_gateway.num_waiting == 1)
    full_gateway.engine.is_ready = False
    reply = future.result(180)
    assert reply.status_code == 529 and "no engine is ready" in reply.text


def test_who_waited_too_long_is_told_when_to_come_again(tmp_path: Path) -> None:
    engine = ScriptedEngine(holds=True, max_running=1)
    with served(tmp_path, engine, queue_seconds=0.5) as hasty:
        hasty.fill()
        reply = hasty.ask("late")
        assert reply.status_code == 529
        assert reply.json()["error"] == {"type": "overloaded_error", "message": "Overloaded"}
        assert 1 <= int(reply.headers["retry-after"]) <= 60
        assert hasty.metric('holdfast_gateway_refused_turns_total{reason="deadline"}') == 1
        assert hasty.metric("holdfast_gateway_journal_backlog ") == NUM_PLACES, "it left no row"


def test_a_workspaces_first_turn_does_not_wait_for_others_prefill(tmp_path: Path) -> None:
    """The engine does not tell how many it runs; two turns it always gets."""
    engine = ScriptedEngine(holds=True)
    with served(tmp_path, engine, engine_queue_tokens=1) as narrow:
        narrow.admin.workspace("other")
        _, key = narrow.admin.make_key("other")
        flood = [narrow.pool.submit(narrow.ask, f"flood {number}") for number in range(6)]
        eventually(lambda: narrow.num_waiting == 4 and len(engine.requests) == 2)
        first = narrow.pool.submit(narrow.ask, "first", key)
        eventually(lambda: len(engine.requests) == 3)
        second = narrow.pool.submit(narrow.ask, "second", key)
        eventually(lambda: narrow.num_waiting == 5)
        assert len(engine.requests) == 3, "its second turn waits for its first one"
        engine.holds = False
        assert all_answered(*flood, first, second)
