"""A turn's record is written while the engine is called, and is on disk before the client hears."""

import errno
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from engine.protocol import ErrorReply
from tests.gateway.admin_client import Admin
from tests.gateway.bodies import body
from tests.gateway.scripted_engine import ScriptedEngine, say
from tests.gateway.serving import API_KEY, WAIT_SECONDS, eventually, serve, serve_gateway

HEADERS = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01"}


class Disk:
    """Syncs of the journal, which wait or fail while the test wants that."""

    def __init__(self, sync: Callable[[int], None]) -> None:
        self._sync = sync
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

    def __call__(self, file: int) -> None:
        self.num_waiting += 1
        self.goes_on.wait(WAIT_SECONDS)
        self.num_waiting -= 1
        if self.is_broken:
            raise OSError(errno.EIO, "Input/output error")
        self._sync(file)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(os.fdatasync)
    monkeypatch.setattr("os.fdatasync", found)
    monkeypatch.setattr("gateway.journal.writer._DEADLINE_SECONDS", WAIT_SECONDS)
    yield found
    found.goes_on.set()


def ask(url: str, heads: list[int] | None = None, **changes: object) -> httpx.Response:
    """A whole answer. Its status is in `heads` as soon as its head has come."""
    request = httpx.Request("POST", f"{url}/v1/messages", json=body(**changes), headers=HEADERS)
    with httpx.Client(timeout=WAIT_SECONDS, trust_env=False) as client:
        reply = client.send(request, stream=True)
        if heads is not None:
            heads.append(reply.status_code)
        reply.read()
        return reply


@pytest.mark.parametrize("stream", [True, False])
def test_the_engine_is_called_meanwhile_and_nothing_goes_out_before_the_sync(
    tmp_path: Path, disk: Disk, stream: bool
) -> None:
    engine = ScriptedEngine()
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url) as url,
        ThreadPoolExecutor() as pool,
    ):
        heads: list[int] = []
        with disk.waits():
            asked = pool.submit(ask, url, heads, stream=stream)
            eventually(lambda: engine.requests and disk.num_waiting)
            # A head that goes out too early does so at once.
            time.sleep(0.5)
            assert not heads and not asked.done()
        assert asked.result().status_code == 200
        eventually(lambda: len(Admin(url).get("turns")) == 1)


@pytest.mark.parametrize("is_refused", [False, True])
def test_where_the_record_cant_be_written_the_request_is_cancelled_and_leaves_nothing(
    tmp_path: Path, disk: Disk, is_refused: bool
) -> None:
    engine = ScriptedEngine(script=say(*["word"] * 1000, delay=1.0))
    if is_refused:
        engine.refusal = ErrorReply("prompt_too_long", "9 tokens > 8")
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url) as url,
        ThreadPoolExecutor() as pool,
    ):
        with disk.waits():
            asked = pool.submit(ask, url, stream=True)
            eventually(lambda: (engine.requests or engine.refused) and disk.num_waiting)
            disk.is_broken = True
        reply = asked.result()
        assert (reply.status_code, reply.json()["error"]["type"]) == (529, "overloaded_error")
        disk.is_broken = False
        eventually(lambda: len(engine.acked) == len(engine.requests))
        eventually(
            lambda: (
                httpx.get(f"{url}/readyz", trust_env=False, timeout=WAIT_SECONDS).status_code == 200
            )
        )
        assert not engine.final and not engine.running
        engine.refusal, engine.script = None, say("Hello")
        assert ask(url).status_code == 200
        eventually(lambda: len(Admin(url).get("turns")) == 1)


def test_an_engine_that_keeps_no_records_hears_of_a_turn_that_the_journal_has(
    tmp_path: Path, disk: Disk
) -> None:
    engine = ScriptedEngine(keeps_records=False)
    with (
        serve(engine) as engine_url,
        serve_gateway(tmp_path, engine_url) as url,
        ThreadPoolExecutor() as pool,
    ):
        with disk.waits():
            asked = pool.submit(ask, url)
            eventually(lambda: disk.num_waiting)
            time.sleep(0.3)
            assert not engine.requests
        assert asked.result().status_code == 200
        assert [request.record for request in engine.requests] == [""]


def test_a_client_that_leaves_meanwhile_has_a_row_with_the_engines_counts(
    tmp_path: Path, disk: Disk
) -> None:
    engine = ScriptedEngine(script=say(*["word"] * 1000, delay=1.0))
    with serve(engine) as engine_url, serve_gateway(tmp_path, engine_url) as url:
        with disk.waits():
            with pytest.raises(httpx.ReadTimeout):
                httpx.post(
                    f"{url}/v1/messages",
                    json=body(stream=True),
                    headers=HEADERS,
                    timeout=httpx.Timeout(WAIT_SECONDS, read=2.0),
                    trust_env=False,
                )
            eventually(lambda: engine.final)
            (final,) = engine.final.values()
        rows = Admin(url)
        eventually(lambda: rows.get("turns") and not engine.final)
        (row,) = rows.get("turns")
        assert (row["outcome"], row["output_tokens"]) == ("client_disconnect", final.output_tokens)
