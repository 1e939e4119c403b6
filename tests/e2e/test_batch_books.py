"""A batch's row is computed once and charged once: over a database that stops, gateways that are
killed, and an owner that is frozen while another gateway takes over."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

import pytest
from anthropic import Anthropic
from anthropic.types.messages import MessageBatch

from gateway.structs.usage import NOT_DELIVERED
from scripts.stack import (
    API_KEY,
    Server,
    free_port,
    gateway_environment,
    migrate,
    serving_engine,
    serving_gateway,
    url_of,
)
from tests.e2e.kills import Killed, idle_stats
from tests.e2e.outage import data_directory, stopped_postgres
from tests.e2e.test_batches import ended, row, sdk_at
from tests.faults.sizes import number, told
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually
from tests.postgres import new_database, running_postgres

ROWS = number(80, 200)
FEWER_ROWS = number(40, 200)
"""Where no owner is waited for."""
TOKENS = 20
OUTAGE_SECONDS = 6
FROZEN_SECONDS = 22  # longer than a batch is owned
ENGINE = {
    "ENGINE_SYNTHETIC_PREFILL_US": "0",
    "ENGINE_SYNTHETIC_DECODE_MS": "60",
    "ENGINE_MIN_CACHE_TOKENS": "64",
}
# So that many windows of rows, and rows at the engine, meet each fault.
CONCURRENCY = 4
GATEWAY = {"HOLDFAST_BATCH_CONCURRENCY": str(CONCURRENCY), "HOLDFAST_LOG_LEVEL": "error"}


@pytest.fixture
def engine() -> Iterator[Server]:
    with serving_engine("synthetic", ENGINE) as running:
        yield running.wait()


@pytest.fixture
def database() -> Iterator[str]:
    """Of a server of its own, since it is stopped."""
    with running_postgres() as server:
        yield new_database(server, uuid4().hex)


def created(sdk: Anthropic, name: str, num_rows: int) -> MessageBatch:
    rows = [row(f"r{place}", f"{name} {place % 4}", max_tokens=TOKENS) for place in range(num_rows)]
    return sdk.messages.batches.create(requests=rows)


def done(sdk: Anthropic, batch: MessageBatch) -> int:
    return sdk.messages.batches.retrieve(batch.id).request_counts.succeeded


def check_books(sdk: Anthropic, batch: MessageBatch, database: str, num_rows: int) -> int:
    """Each row has a whole result, whose turn was charged once as it says. Return the ledger's
    tokens of output."""
    results = list(sdk.messages.batches.results(batch.id))
    assert [result.custom_id for result in results] == [f"r{place}" for place in range(num_rows)]
    turns = ledger_rows(database)
    by_id = {turn["id"]: turn for turn in turns}
    assert len(turns) == len(by_id) == num_rows
    for result in results:
        assert result.result.type == "succeeded"
        message = result.result.message
        turn = by_id.pop(message.id)
        assert message.usage.output_tokens == turn["output_tokens"] == TOKENS
        assert message.usage.input_tokens == turn["input_tokens"]
        assert message.usage.cache_read_input_tokens == turn["cache_read_tokens"]
        assert (turn["status"], turn["outcome"]) == (200, "length")
        assert turn["price"] != NOT_DELIVERED and turn["cost_nano"] > 0
    assert not by_id
    return sum(turn["output_tokens"] for turn in turns)


@pytest.mark.postgres
def test_rows_that_end_while_the_database_is_stopped_are_computed_and_charged_once(
    tmp_path: Path, engine: Server, database: str
) -> None:
    settings = {**GATEWAY, "HOLDFAST_DATABASE_URL": database}
    with (
        serving_gateway(tmp_path, [engine.url], settings) as gateway,
        sdk_at(gateway.wait().url) as sdk,
    ):
        data = data_directory(database)
        batch = created(sdk, "outage", FEWER_ROWS)
        for _ in range(number(1, 4)):
            before = done(sdk, batch)
            eventually(lambda before=before: done(sdk, batch) > before)  # type: ignore[misc]
            with stopped_postgres(data):
                time.sleep(OUTAGE_SECONDS)
        ended(sdk, batch)
        charged = check_books(sdk, batch, database, FEWER_ROWS)
    computed = idle_stats(engine.url)["counters"]["output_tokens"]
    told("batches: the database stopped", rows=FEWER_ROWS, charged=charged, computed=computed)
    assert computed == charged


def test_rows_of_killed_gateways_are_charged_once(tmp_path: Path, engine: Server) -> None:
    port = free_port()
    settings = gateway_environment(port, tmp_path, [engine.url], GATEWAY)
    migrate(settings)
    gateway = Killed(tmp_path, settings, url_of(port))
    kills = number(1, 4)
    try:
        with sdk_at(gateway.url) as sdk:
            batch = created(sdk, "kills", FEWER_ROWS)
            for _ in range(kills):
                before = done(sdk, batch)
                eventually(lambda before=before: done(sdk, batch) > before)  # type: ignore[misc]
                gateway.kill()
                gateway.start()
            ended(sdk, batch)
            charged = check_books(sdk, batch, f"sqlite:///{tmp_path / 'ledger.db'}", FEWER_ROWS)
    finally:
        gateway.stop()
    computed = idle_stats(engine.url)["counters"]["output_tokens"]
    told("batches: gateways killed", rows=FEWER_ROWS, charged=charged, computed=computed)
    # What was at the engine at a kill is computed again, and no more.
    assert charged <= computed <= charged + kills * CONCURRENCY * TOKENS


@contextmanager
def frozen(gateway: Server) -> Iterator[None]:
    os.kill(gateway.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(gateway.pid, signal.SIGCONT)


@pytest.mark.postgres
def test_a_frozen_owner_and_the_gateway_that_took_over_charge_a_row_once(
    tmp_path: Path, engine: Server, database: str
) -> None:
    settings = {**GATEWAY, "HOLDFAST_DATABASE_URL": database}
    freezes = number(1, 2)
    with (
        serving_gateway(tmp_path / "one", [engine.url], settings) as first_gateway,
        serving_gateway(tmp_path / "two", [engine.url], settings) as two,
        sdk_at(first_gateway.wait().url, API_KEY) as first,
        sdk_at(two.wait().url, API_KEY) as second,
    ):
        batch = created(first, "frozen", ROWS)
        # Whoever owns it is frozen: the other takes it over, and both go on.
        for turn in range(freezes):
            gateway, sdk = ((first_gateway, second), (two, first))[turn]
            before = done(sdk, batch)
            eventually(lambda sdk=sdk, before=before: done(sdk, batch) > before)  # type: ignore[misc]
            with frozen(gateway):
                time.sleep(FROZEN_SECONDS)
        ended(first, batch)
        charged = check_books(first, batch, database, ROWS)
    computed = idle_stats(engine.url)["counters"]["output_tokens"]
    told("batches: the owner frozen", rows=ROWS, charged=charged, computed=computed)
    # Two times computed, and charged once, are rows that the frozen owner had at the engine, and
    # those that had ended in its journal and not yet in the database: its drain looks more often
    # than a row takes.
    assert charged <= computed <= charged + freezes * 2 * CONCURRENCY * TOKENS
