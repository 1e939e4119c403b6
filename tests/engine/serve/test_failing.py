"""What an engine says and does when its thread, or a loop of its process, ends by an error."""

import asyncio
import json
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import cast

import anyio
import httpx
import msgspec
import pytest
from structlog.testing import capture_logs

from engine.backends.contract import EngineBackend
from engine.backends.external import MirrorPool
from engine.backends.vllm.core import VllmCore
from engine.backends.vllm.directive import CALL, CoreStats
from engine.backends.vllm.loop import HeldCache, HeldEntries, VllmLoop
from engine.cache.digests import ChainHasher
from engine.clock import ManualClock
from engine.metrics import render
from engine.protocol.reports import BlockStats, Description
from engine.schedule.accounting import Accounting
from engine.serve.health import ServedEngine
from engine.supervisor import CALLBACKS, STEADY_SECONDS, Expected, Supervisor, trace_of
from scripts.stack import free_port, python, start, wait_until_ready
from tests.conformance.engines import prompt
from tests.engine.backends.local import description
from tests.engine.serve.failing_engine import PANIC_TOKENS, SECRET_WORD

EXIT_SECONDS = 180.0
SECRET = "a-secret-of-some-length"
NO_BLOCKS = BlockStats(total=0, free=0, active=0, leased=0, best_effort=0, cached=0)


@pytest.mark.parametrize(
    ("num_words", "error"), [(2, "KeyError"), (2 * PANIC_TOKENS, "Panic")], ids=["error", "panic"]
)
def test_the_end_of_the_engines_thread_ends_the_process_with_one_line_without_content(
    num_words: int, error: str, tmp_path: Path
) -> None:
    """What runs is cut off at once, whatever time the settings give to it; and for a moment
    `/readyz` says why, so that gateways know."""
    port = free_port()
    log = tmp_path / "log"
    environment = {
        "ENGINE_SECRET": SECRET,
        "ENGINE_PORT": str(port),
        "ENGINE_GRACE_SECONDS": "10000",
        "ENGINE_LOG_LEVEL": "error",
    }
    process = start(python("tests.engine.serve.failing_engine"), environment, log)
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(url, process, "/readyz", log)
        body = {
            "request_id": "r",
            "scope": "scope",
            "prompt": msgspec.to_builtins(prompt(f"{SECRET_WORD} " * num_words)),
            "sampling": {"max_tokens": 1},
        }
        headers = {"authorization": f"Bearer {SECRET}"}
        with suppress(httpx.RemoteProtocolError):
            httpx.post(f"{url}/v1/generate", json=body, headers=headers, timeout=EXIT_SECONDS)
        reply = httpx.get(f"{url}/readyz", timeout=EXIT_SECONDS)
        assert reply.status_code == 503
        assert (reply.json()["stage"], reply.json()["error"]) == ("failed", error)
        refusal = httpx.get(f"{url}/v1/stats", headers=headers, timeout=EXIT_SECONDS)
        assert refusal.json()["code"] == "not_ready", "nothing that needs its thread waits for it"
        assert process.wait(EXIT_SECONDS) == 1
    finally:
        process.kill()
        process.wait(EXIT_SECONDS)
    text = log.read_text("utf-8")
    (log_line,) = [json.loads(line) for line in text.splitlines() if '"engine failed"' in line]
    assert log_line["error"] == error
    assert "in execute" in log_line["trace"] and log_line["trace"].rstrip().endswith(error)
    assert SECRET_WORD not in text


class BrokenClock(ManualClock):
    """Tells the time, unless it is broken."""

    is_broken = False

    def now(self) -> float:
        if self.is_broken:
            raise ValueError("no time")
        return super().now()


class SilentLlm:
    """vLLM that runs nothing and lost nothing."""

    def __init__(self) -> None:
        self.engine_core = self

    async def call_utility_async(self, name: str, *_: object) -> object:
        if name == CALL.format("losses"):
            return []
        return msgspec.to_builtins(CoreStats(blocks=NO_BLOCKS))


def loop_of(clock: ManualClock, supervisor: Supervisor, llm: SilentLlm) -> VllmLoop:
    """vLLM's loop, of its own parts, over nothing that computes."""
    pool = MirrorPool(8, 16)
    cache = HeldCache(pool, HeldEntries(pool), ChainHasher(bytes(32), 16))
    core = VllmCore(llm, 100, takes_seeds=True, is_owner=True)
    running = asyncio.get_running_loop()
    accounting = Accounting(cache, clock, lambda events: None, epoch="e", max_context_tokens=64)
    return VllmLoop(
        core,
        accounting,
        cache,
        running,
        supervisor,
        max_waiting=1,
        max_leased_blocks=4,
        max_context_tokens=1024,
    )


@pytest.mark.anyio
async def test_a_loop_that_fails_is_restarted_and_the_engine_is_not_ready_and_says_which() -> None:
    clock = BrokenClock()
    now = [0.0]
    crashes = list[BaseException]()
    supervisor = Supervisor(lambda: now[0])
    host = ServedEngine(lambda: None, supervisor)
    host.note_loaded()
    loop_of(clock, supervisor, SilentLlm()).start(crashes.append)
    await anyio.sleep(0.05)
    assert host.readiness.ready and host.readiness.failing == []
    clock.is_broken = True
    with anyio.fail_after(60):
        while not host.readiness.failing:
            await anyio.sleep(0.05)
    readiness = host.readiness
    assert (readiness.ready, readiness.stage, readiness.failing) == (False, "ready", ["expiry"])
    num_ends = supervisor.ends["expiry"]
    assert num_ends >= 3
    assert f'holdfast_engine_loop_ends_total{{loop="expiry"}} {num_ends}' in render(
        None, supervisor.ends
    ).decode().replace(".0", "")
    clock.is_broken = False
    with anyio.fail_after(60):
        while not supervisor._watched["expiry"].is_running:
            await anyio.sleep(0.05)
    assert not host.readiness.ready, "it must run for a while before it counts as well"
    now[0] += STEADY_SECONDS
    assert host.readiness.ready and host.readiness.failing == []
    await supervisor.close()
    assert not crashes


@pytest.mark.anyio
async def test_an_error_that_no_caller_takes_is_counted_and_logged_without_content(
    capsys: pytest.CaptureFixture[str],
) -> None:
    supervisor = Supervisor()
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(supervisor.note_unhandled)
    loop.call_soon(lambda: {}[SECRET_WORD])
    await anyio.sleep(0.05)
    assert supervisor.ends[CALLBACKS] == 1
    log_text = capsys.readouterr().out
    assert "KeyError" in log_text and SECRET_WORD not in log_text


def test_a_trace_has_causes_and_the_messages_of_the_machine_alone() -> None:
    try:
        try:
            raise ValueError(SECRET_WORD)
        except ValueError as cause:
            raise RuntimeError("CUDA error: out of memory") from cause
    except RuntimeError as error:
        trace = trace_of(error)
    assert "ValueError\n" in trace and "RuntimeError: CUDA error: out of memory" in trace
    assert SECRET_WORD not in trace


async def _away(why: list[str], _stopping: asyncio.Event) -> None:
    raise Expected(why[0])


class NothingToLoad:
    """A backend that is ready at once."""

    def load(self, _progress: object) -> None: ...

    def describe(self) -> Description:
        return description()

    async def stop(self) -> None: ...


@pytest.mark.anyio
async def test_memory_that_is_missing_in_a_callback_ends_the_engine() -> None:
    """A worker's answer was lost so, and an engine that was ready answered nothing."""

    def fail(error: Exception) -> None:
        raise error

    failures = list[str]()
    host = ServedEngine(lambda: failures.append(host.readiness.error))
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    try:
        async with host.running(cast(EngineBackend, NothingToLoad())):
            loop.call_soon(fail, KeyError("one request's"))
            await asyncio.sleep(0.05)
            assert failures == [] and not host.is_ending
            loop.call_soon(fail, MemoryError())
            await asyncio.sleep(0.05)
            assert failures == ["out of memory (MemoryError)"] and host.is_ending
    finally:
        loop.set_exception_handler(before)


def torch_error(message: str) -> RuntimeError:
    """As torch raises it of the machine's memory, behind an error of ours."""
    error = RuntimeError(message)
    error.__cause__ = ValueError("the cause")
    return error


class OutOfMemoryError(RuntimeError):
    """Has the name of torch's, which is one of a device."""


@pytest.mark.parametrize(
    ("error", "is_told"),
    [
        (MemoryError(), True),
        (OutOfMemoryError("CUDA"), True),
        (torch_error("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9"), True),
        (torch_error("CUDA error: out of memory"), True),
        (OSError(12, "Cannot allocate memory"), True),
        (torch_error("shape mismatch"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_missing_memory_is_told_by_that_word_and_not_by_the_class_of_the_error(
    error: BaseException, is_told: bool
) -> None:
    """An operator does another thing then. What a ValueError says may be a request's words."""
    for raised in (error, RuntimeError("a step failed")):
        if raised is not error:
            raised.__cause__ = error
        host = ServedEngine(lambda: None)
        host.crash(raised)
        assert host.readiness.error.startswith("out of memory (") == is_told
        assert type(raised).__name__ in host.readiness.error


@pytest.mark.anyio
async def test_what_a_loop_waits_for_is_told_once_and_without_a_traceback() -> None:
    with capture_logs() as logged:
        supervisor = Supervisor()
        why = ["it is away"]
        supervisor.start("watch", partial(_away, why))
        while supervisor.ends["watch"] < 4:
            await asyncio.sleep(0.01)
        assert [failure.loop for failure in supervisor.failing] == ["watch"], (
            "not ready all the same"
        )
        why[0] = "it is denied"
        while len(logged) < 2:
            await asyncio.sleep(0.01)
        await supervisor.close()
    assert [line["why"] for line in logged] == ["it is away", "it is denied"]
    assert all(line["event"] == "loop_waits" and "trace" not in line for line in logged)
