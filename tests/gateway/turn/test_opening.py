"""A turn's record is on disk before an engine hears of it."""

import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from gateway.journal import store
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import API_KEY, WAIT_SECONDS, eventually, serve, serve_gateway

HEADERS = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}


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
    found = Disk(store._commit)
    monkeypatch.setattr(store, "_commit", found)
    monkeypatch.setattr(store, "_DEADLINE_SECONDS", WAIT_SECONDS)
    yield found
    found.goes_on.set()


def ask(url: str, **changes: object) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/messages",
        json=body(**changes),
        headers=HEADERS,
        timeout=WAIT_SECONDS,
        trust_env=False,
    )


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_asked_of_an_engine_before_the_record_is_on_disk(
    tmp_path: Path, disk: Disk, stream: bool
) -> None:
    engine = ScriptedEngine()
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url) as url,
        ThreadPoolExecutor() as pool,
    ):
        with disk.waits():
            asked = pool.submit(ask, url, stream=stream)
            eventually(lambda: disk.num_waiting)
            time.sleep(0.5)
            assert not engine.requests and not asked.done()
        assert asked.result().status_code == 200
        eventually(lambda: len(Admin(url).get("turns")) == 1)


def test_where_the_record_cant_be_written_the_client_is_told_and_nothing_is_left(
    tmp_path: Path, disk: Disk
) -> None:
    engine = ScriptedEngine()
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url) as url,
        ThreadPoolExecutor() as pool,
    ):
        with disk.waits():
            asked = pool.submit(ask, url, stream=True)
            eventually(lambda: disk.num_waiting)
            disk.is_broken = True
        for refused in (asked.result(), ask(url)):
            assert refused.status_code == 529
            assert refused.json()["error"]["type"] == "overloaded_error"
        disk.is_broken = False
        ready = f"{url}/readyz"
        eventually(lambda: httpx.get(ready, trust_env=False, timeout=60).status_code == 200)
        assert not engine.requests
        assert ask(url).status_code == 200
        eventually(lambda: len(Admin(url).get("turns")) == 1)


def test_a_client_that_leaves_meanwhile_leaves_nothing(tmp_path: Path, disk: Disk) -> None:
    engine = ScriptedEngine()
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        with disk.waits():
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{url}/v1/messages",
                    json=body(stream=True),
                    headers=HEADERS,
                    timeout=httpx.Timeout(WAIT_SECONDS, read=1.0),
                    trust_env=False,
                )
            time.sleep(0.3)
        assert ask(url).status_code == 200
        eventually(lambda: len(Admin(url).get("turns")) == 1)
        assert len(engine.requests) == 1
        ready = httpx.get(f"{url}/readyz", trust_env=False, timeout=60).json()
        assert ready["journal"]["backlog"] == 0
