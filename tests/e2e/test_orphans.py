"""`kill -9` while a turn's record is being written."""

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec

from engine.protocol import FinalCounts
from engine.protocol.reports import Stats
from gateway.journal.store import OPEN, rows_in
from scripts.stack import (
    API_KEY,
    ENGINE_SECRET,
    Process,
    free_port,
    gateway_environment,
    migrate,
    python,
    serving_engine,
    start,
    stop,
    url_of,
    wait_until_ready,
)
from tests.e2e.kills import CLASSES, ledger_rows
from tests.gateway.serving import WAIT_SECONDS, eventually

ENGINE = {"ENGINE_SYNTHETIC_DECODE_MS": "20", "ENGINE_LOG_LEVEL": "error"}


def ask(url: str, max_tokens: int) -> int:
    """Begin a stream and read it to its end; return the bytes that came."""
    num_bytes = 0
    content = {
        "model": "synthetic",
        "max_tokens": max_tokens,
        "stream": True,
        "messages": [{"role": "user", "content": "Tell me of leases. " * 40}],
        "metadata": {"name": "the orphan"},
    }
    headers = {"x-api-key": API_KEY, "anthropic-version": "2023-06-01", "user-agent": "orphan/1"}
    try:
        with httpx.Client(trust_env=False, timeout=WAIT_SECONDS) as client:
            with client.stream("POST", f"{url}/v1/messages", json=content, headers=headers) as got:
                num_bytes += len(got.headers.raw)
                for chunk in got.iter_raw():
                    num_bytes += len(chunk)
    except httpx.TransportError:
        pass
    return num_bytes


class House:
    """A gateway that starts and ends over one journal and ledger, and its engine."""

    def __init__(self, data: Path, engine_url: str) -> None:
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        self._engine, self._headers = engine_url, headers
        self._data, port = data, free_port()
        self._settings = gateway_environment(
            port, data, [engine_url], {"HOLDFAST_LOG_LEVEL": "error"}
        )
        migrate(self._settings)
        self.url = url_of(port)

    @contextmanager
    def gateway(self, *command: str) -> Iterator[Process]:
        process = start([*python(command[0]), *command[1:], "serve"], self._settings)
        try:
            wait_until_ready(self.url, process)
            yield process
        finally:
            if process.poll() is None:
                stop(process)

    def rows(self) -> dict[str, dict[str, Any]]:
        rows = ledger_rows(f"sqlite:///{self._data / 'ledger.db'}")
        found = {row["id"]: row for row in rows}
        assert len(found) == len(rows)
        return found

    def unacknowledged(self) -> list[FinalCounts]:
        return msgspec.json.decode(self._told("unacknowledged"), type=list[FinalCounts])

    def stats(self) -> Stats:
        return msgspec.json.decode(self._told("stats"), type=Stats)

    def _told(self, what: str) -> bytes:
        asked = f"{self._engine}/v1/{what}"
        reply = httpx.get(asked, headers=self._headers, timeout=WAIT_SECONDS, trust_env=False)
        return reply.content

    def open_turns(self) -> set[str]:
        return {row.id for row in rows_in(self._data / "journal") if row.state == OPEN}


def test_a_turn_whose_record_was_being_written_reaches_no_engine_and_leaves_nothing(
    tmp_path: Path,
) -> None:
    hold = tmp_path / "hold"
    with serving_engine("synthetic", ENGINE) as server, ThreadPoolExecutor() as pool:
        house = House(tmp_path / "gateway", server.wait().url)
        with house.gateway("tests.gateway.held_disk", str(hold)) as gateway:
            assert ask(house.url, 2) > 0
            eventually(lambda: len(house.rows()) == 1 and not house.unacknowledged())
            hold.touch()
            asked = pool.submit(ask, house.url, 4)
            time.sleep(1.0)
            assert not asked.done() and not house.stats().running
            gateway.send_signal(signal.SIGKILL)
            gateway.wait()
        assert asked.result() == 0 and not house.open_turns() and not house.unacknowledged()
        with house.gateway("gateway"):
            assert ask(house.url, 2) > 0
            eventually(lambda: len(house.rows()) == 2 and not house.unacknowledged())
        totals = house.stats().counters
        told = {name: sum(each[name] for each in house.rows().values()) for name in CLASSES}
        assert told == {name: getattr(totals, name) for name in CLASSES}
