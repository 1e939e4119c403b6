"""What an engine's own figures say is wrong with it."""

import asyncio
from contextlib import aclosing
from typing import Any

import msgspec
import pytest

from engine.protocol.reports import Description, Guarantee, Stats
from gateway.conditions.engines import Increases, of_engine, of_stats
from gateway.routing.breaker import FAILURES
from gateway.routing.client import EngineHttp
from gateway.routing.engine import Engine
from gateway.structs.fleet import EngineStatus


@pytest.mark.parametrize(
    ("entries", "leases", "automatic", "is_told"),
    [(10, 10, 0, False), (100, 10, 90, False), (100, 8, 90, True), (10, 5, 0, True)],
)
def test_entries_that_nobody_asked_for_lack_no_lease(
    entries: int, leases: int, automatic: int, is_told: bool
) -> None:
    """The alert HoldfastLeaseBudgetFull leaves them out, too."""
    stats = stats_of(num_entries=entries, num_leases=leases, num_automatic=automatic)
    kinds = {finding.kind for finding in of_stats("engine-0", stats, Increases(), 0.0)}
    assert kinds == ({"leases_full"} if is_told else set())


def stats_of(**more: Any) -> Stats:
    blocks = {"total": 100, "free": 90, "active": 0, "leased": 10, "best_effort": 0, "cached": 0}
    counters = dict.fromkeys(Stats.__annotations__["counters"].__struct_fields__, 0)
    fields = {
        "epoch": "e",
        "uptime_seconds": 1.0,
        "running": 0,
        "waiting": 0,
        "blocks": blocks,
        "counters": counters,
    }
    return msgspec.convert(fields | more, Stats)


def test_slots_that_get_no_requests_are_told() -> None:
    (finding,) = of_stats("engine-0", stats_of(slots_away=2), Increases(), 0.0)
    assert (finding.kind, finding.about) == ("slots_in_use", "engine-0")
    assert finding.cause == "2 slots of its server get no requests"


def test_the_servers_flag_that_takes_leases_away_is_told() -> None:
    store = {"is_up": False, "refused": "server_flags", "problem": "start it with --cache-ram 0"}
    (finding,) = of_stats("engine-0", stats_of(store=store), Increases(), 0.0)
    assert (finding.kind, finding.about) == ("store_off", "the store of engine-0")
    assert finding.cause.endswith("does not keep slot files: start it with --cache-ram 0")


@pytest.mark.anyio
@pytest.mark.parametrize("is_kept", [True, False])
async def test_an_engine_that_does_not_keep_workspaces_apart_is_told(is_kept: bool) -> None:
    """The cause is for operators. A workspace's key is told what it means."""
    note = "ExampleConnector may give one workspace what another wrote"
    async with aclosing(EngineHttp()) as http:
        engine = Engine("engine-0", "http://127.0.0.1:1", "secret of sixteen", http)
        engine.status = "ready"
        engine.description = Description(
            backend="upstream",
            model="m",
            epoch="e",
            max_context_tokens=1024,
            block_size=16,
            num_blocks=64,
            granularity=16,
            min_cache_tokens=32,
            capabilities=[],
            guarantees=[Guarantee("isolation", is_kept, note)],
        )
        findings = list(of_engine(engine, Increases(), 0.0))
    if is_kept:
        assert findings == []
        return
    (finding,) = findings
    assert (finding.kind, finding.cause) == ("engine_not_isolated", note)
    assert "another workspace" in finding.cause_for_all and note not in finding.cause_for_all


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("status", "kinds"),
    [("ready", ["engine_breaker_open"]), ("down", ["engine_not_answering"])],
)
async def test_a_breaker_is_told_of_an_engine_that_answers_alone(
    status: EngineStatus, kinds: list[str]
) -> None:
    """One that stands still was told twice, with two things to do."""
    async with aclosing(EngineHttp()) as http:
        engine = Engine("engine-0", "http://127.0.0.1:1", "secret of sixteen", http)
        engine.status = status
        for number in range(FAILURES):
            engine.breaker.failed(f"turn {number}", 0.0)
        assert [finding.kind for finding in of_engine(engine, Increases(), 0.0)] == kinds


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("error", "kind"),
    [
        ("out of memory (RuntimeError)", "engine_out_of_memory"),
        ("OutOfMemoryError", "engine_out_of_memory"),
        ("KeyError", "engine_failing"),
    ],
)
async def test_an_engine_that_said_why_it_ends_is_told_so_when_it_is_gone(
    error: str, kind: str
) -> None:
    """It was told as one that does not answer, with "cannot connect" as the cause."""
    ready = '{"stage": "loading", "progress": 0.1, "ready": false, "failing": [], "error": ""}'
    replies = [f'{{"stage": "failed", "ready": false, "error": "{error}"}}', ready]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        body = replies.pop(0)
        head = f"HTTP/1.1 503 Service Unavailable\r\ncontent-length: {len(body)}\r\n"
        writer.write(f"{head}connection: close\r\n\r\n{body}".encode())
        await writer.drain()
        writer.close()

    def kinds(engine: Engine) -> list[str]:
        return [finding.kind for finding in of_engine(engine, Increases(), engine.monotonic())]

    async with aclosing(EngineHttp()) as http:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        engine = Engine("engine-0", f"http://127.0.0.1:{port}", "secret of sixteen", http)
        await engine.poll()
        (finding,) = of_engine(engine, Increases(), 0.0)
        assert (finding.kind, finding.cause) == (kind, f"it ended by an error, {error}")
        server.close()
        await server.wait_closed()
        await engine.poll()
        assert engine.status == "down"
        (finding,) = of_engine(engine, Increases(), 0.0)
        assert finding.kind == kind
        assert finding.cause == f"it ended by an error, {error}; now: cannot connect"
        assert finding.cause_for_all == "it ended by an error"
        # It is started again, and killed while it loads: that is another thing.
        async with await asyncio.start_server(answer, "127.0.0.1", port):
            await engine.poll()
            assert kinds(engine) == ["engine_starting"]
        await engine.poll()
        assert kinds(engine) == ["engine_not_answering"]
