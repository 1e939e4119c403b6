"""A turn whose close can't be written: its row says what the client got, and nothing is charged."""

import os
import resource
import sqlite3
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.journal.file import rows_in
from gateway.journal.table import OPEN
from gateway.structs.usage import NOT_DELIVERED
from scripts.bench.load import body_of
from scripts.stack import API_HEADERS, serving_engine, serving_gateway
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually

TURNS = 3
DECODE_MS = 40
TOKENS = 60
STATUSES = {True: 200, False: 500}
"""By whether the answer is a stream, the status of one that could not be recorded."""


@pytest.fixture(scope="module")
def engine() -> Iterator[str]:
    settings = {"ENGINE_SYNTHETIC_DECODE_MS": str(DECODE_MS), "ENGINE_MIN_CACHE_TOKENS": "64"}
    with serving_engine("synthetic", settings) as running:
        yield running.wait().url


def ask(url: str, number: int, *, stream: bool) -> httpx.Response:
    body = body_of("synthetic", "Rules. " * 200, f"Question {number}", max_tokens=TOKENS)
    return httpx.post(
        f"{url}/v1/messages", json=body | {"stream": stream}, headers=API_HEADERS, timeout=120
    )


@contextmanager
def held(journal: Path, process: int) -> Iterator[None]:
    """Somebody else holds the journal's file, until the clients have their errors: the close that
    is still tried then works, and must not stand."""
    with closing(sqlite3.connect(journal / "journal.db", isolation_level=None)) as holder:
        holder.execute("BEGIN IMMEDIATE")
        yield
        holder.execute("ROLLBACK")


@contextmanager
def full(journal: Path, process: int) -> Iterator[None]:
    """No file takes a byte of this process, as where its disk is full."""
    limits = resource.prlimit(process, resource.RLIMIT_FSIZE)
    resource.prlimit(process, resource.RLIMIT_FSIZE, (0, limits[1]))
    yield
    resource.prlimit(process, resource.RLIMIT_FSIZE, limits)


def open_turns(journal: Path) -> int:
    return sum(row.state == OPEN for row in rows_in(journal))


@pytest.mark.parametrize("trouble", [held, full])
def test_an_answer_that_can_not_be_recorded_is_an_error_in_its_row_and_costs_nothing(
    tmp_path: Path,
    engine: str,
    trouble: Callable[[Path, int], AbstractContextManager[None]],
) -> None:
    """Of streams, whose status was sent before, and of answers in one piece."""
    journal = tmp_path / "journal"
    log = Path(os.devnull)  # no file: it could not grow either
    with (
        serving_gateway(tmp_path, [engine], log=log) as gateway,
        ThreadPoolExecutor(2 * TURNS) as pool,
    ):
        url = gateway.wait().url
        for stream in STATUSES:
            assert ask(url, -1, stream=stream).status_code == 200
        replies: dict[bool, list[Future[httpx.Response]]] = {
            stream: [pool.submit(ask, url, number, stream=stream) for number in range(TURNS)]
            for stream in STATUSES
        }
        eventually(lambda: open_turns(journal) == 2 * TURNS)
        with trouble(journal, gateway.process.pid):
            failed = {
                stream: [reply.result() for reply in futures] for stream, futures in replies.items()
            }
        for stream, status in STATUSES.items():
            for reply in failed[stream]:
                assert reply.status_code == status
                assert "could not be recorded" in reply.text
        for stream in STATUSES:
            eventually(partial(is_answered, url, stream))  # 529 for a moment
        eventually(lambda: len(rows_of(tmp_path)) == 2 * (TURNS + 2))
    rows = rows_of(tmp_path)
    errors = [row for row in rows if row["outcome"] == "api_error"]
    assert Counter(row["status"] for row in errors) == {200: TURNS, 500: TURNS}
    for row in errors:
        assert "could not be recorded" in row["error"]
        assert (row["price"], row["cost_nano"]) == (NOT_DELIVERED, 0)
        # The engine's work is told apart.
        assert row["output_tokens"] == TOKENS and row["decode_seconds"] > 0
    for row in rows:
        if row["outcome"] != "api_error":
            assert row["status"] == 200 and row["price"] != NOT_DELIVERED


def is_answered(url: str, stream: bool) -> bool:
    return ask(url, TURNS, stream=stream).status_code == 200


def rows_of(data: Path) -> list[dict[str, Any]]:
    return ledger_rows(f"sqlite:///{data / 'ledger.db'}")
