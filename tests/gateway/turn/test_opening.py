"""A turn's record is on disk before an engine hears of it."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import httpx
import pytest

from gateway.journal import store
from tests.gateway.bodies import body
from tests.gateway.conftest import Stack
from tests.gateway.serving import WAIT_SECONDS, eventually, metric


class Disk:
    """Commits of the journal, which wait or fail while the test wants that."""

    def __init__(self, commit: Callable[[sqlite3.Connection], None]) -> None:
        self._commit = commit
        self.goes_on = threading.Event()
        self.goes_on.set()
        self.is_broken = False
        self.num_waiting = 0

    @contextmanager
    def waits(self) -> Iterator[None]:
        self.goes_on.clear()
        try:
            yield
        finally:
            self.goes_on.set()

    def __call__(self, db: sqlite3.Connection) -> None:
        self.num_waiting += 1
        self.goes_on.wait(WAIT_SECONDS)
        self.num_waiting -= 1
        if self.is_broken:
            raise sqlite3.OperationalError("disk I/O error")
        self._commit(db)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    slow_disk = Disk(store._commit)
    monkeypatch.setattr(store, "_commit", slow_disk)
    monkeypatch.setattr(store, "_DEADLINE_SECONDS", WAIT_SECONDS)
    yield slow_disk
    slow_disk.goes_on.set()


def ask(stack: Stack, *, seconds: float = WAIT_SECONDS, **changes: object) -> httpx.Response:
    with stack.http() as http:
        timeout = httpx.Timeout(WAIT_SECONDS, read=seconds)
        return http.post("/v1/messages", json=body(**changes), timeout=timeout)


def num_turns(stack: Stack) -> int:
    return len(stack.admin("turns?limit=100").json())


def backlog(stack: Stack) -> int:
    ready = httpx.get(f"{stack.url}/readyz", timeout=WAIT_SECONDS, trust_env=False).json()
    return int(ready["journal"]["backlog"])


def num_left(stack: Stack) -> float:
    """How many clients left before their answer."""
    name = 'holdfast_gateway_requests_total{route="/v1/messages",status="499"}'
    return metric(stack.url, name)


def test_where_the_record_cant_be_written_the_client_is_told_and_nothing_is_left(
    stack: Stack, disk: Disk
) -> None:
    before = num_turns(stack)
    with ThreadPoolExecutor() as pool:
        with disk.waits():
            future = pool.submit(ask, stack, stream=True)
            eventually(lambda: disk.num_waiting)
            time.sleep(0.5)
            assert not stack.engine.requests and not future.done()
            disk.is_broken = True
        for refused in (future.result(), ask(stack)):
            assert refused.status_code == 529
            assert refused.json()["error"]["type"] == "overloaded_error"
    disk.is_broken = False
    eventually(stack.is_ready)
    assert not stack.engine.requests
    assert ask(stack).status_code == 200
    eventually(lambda: num_turns(stack) == before + 1)


def test_a_client_that_leaves_meanwhile_leaves_nothing(stack: Stack, disk: Disk) -> None:
    before = num_turns(stack)
    left = num_left(stack)
    with disk.waits():
        with pytest.raises(httpx.ReadTimeout):
            ask(stack, seconds=1.0, stream=True)
        eventually(lambda: num_left(stack) == left + 1)
    assert ask(stack).status_code == 200
    eventually(lambda: num_turns(stack) == before + 1)
    assert len(stack.engine.requests) == 1
    # The ledger has the turn a moment before the journal lets it go.
    eventually(lambda: backlog(stack) == 0)
