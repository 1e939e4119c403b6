"""Real worker processes over the demo model's real renderer, driven by the real backend."""

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import uvloop

from engine.backends.local import LocalBackend
from engine.backends.prepare import process as worker_process
from engine.backends.prepare.prepared import Answer, Job, Start
from engine.backends.prepare.process import WorkerProcess
from engine.errors import InvalidRequest, Overloaded, TooCostly
from engine.protocol import CountRequest, GenerateRequest, Sampling, Tool, ToolChoice
from engine.settings import DEMO_MODEL
from engine.text.renderer import ChatRenderer
from tests.engine.backends.local import SCOPE, finish, prompt, request, serving

pytestmark = pytest.mark.anyio

OTHER = "b" * 32
WORDS = "hello world, what is it 12 "


@pytest.fixture(scope="module")
def anyio_backend() -> str:
    return "asyncio"


@asynccontextmanager
async def backend(**bounds: Any) -> AsyncIterator[LocalBackend]:
    described = {
        "max_context_tokens": 1 << 20,
        "num_blocks": 1 << 17,
        "longest_token_bytes": 93,
        "capabilities": ["copy_on_write", "multiple_choices", "tools", "forced_tools"],
    }
    async with serving(described=described, bounds=bounds) as local_engine:
        yield local_engine


@pytest.fixture(scope="module")
async def engine() -> AsyncIterator[LocalBackend]:
    async with backend() as local_engine:
        yield local_engine


def counting(text: str) -> CountRequest:
    return CountRequest(SCOPE, prompt(text))


def forced(num_properties: int, **fields: Any) -> GenerateRequest:
    properties = {f"property_{i}": {"type": "string"} for i in range(num_properties)}
    tools = [Tool("t", {"type": "object", "properties": properties})]
    return request(prompt("q", tools=tools), tool_choice=ToolChoice("any"), **fields)


def workers(engine: LocalBackend) -> list[WorkerProcess]:
    return engine._loaded.preparation._workers  # type: ignore[union-attr, attr-defined, no-any-return]


def children() -> list[int]:
    """The worker processes of this one."""
    pids = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):
            status = (path.parent / "stat").read_text().rsplit(")", 1)[1].split()
            if b"prepare.worker" in path.read_bytes() and int(status[1]) == os.getpid():
                pids.append(int(path.parent.name))
    return pids


async def kill_workers(engine: LocalBackend) -> None:
    """Until the engine knows that its workers' processes have ended."""
    running = [worker._process for worker in workers(engine) if worker._process is not None]
    assert running
    for process in running:
        process.kill()
    async with asyncio.timeout(180):
        while any(process.returncode is None for process in running):
            await asyncio.sleep(0.01)


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(180):
        while not is_so():
            await asyncio.sleep(0.01)


async def test_neither_tokenizing_nor_compiling_stops_other_threads(engine: LocalBackend) -> None:
    """Some 200,000 tokens, which hold the interpreter's lock for a second in one process."""
    await finish(engine, request())
    gaps = [0.0]
    is_over = threading.Event()

    def beat() -> None:
        last = time.perf_counter()
        while not is_over.wait(0.001):
            now = time.perf_counter()
            gaps.append(now - last)
            last = now

    thread = threading.Thread(target=beat)
    thread.start()
    began = time.perf_counter()
    counted = await engine.count(counting("hello world this is some text 123 " * 16_000))
    seconds = time.perf_counter() - began
    with suppress(InvalidRequest):
        await finish(engine, forced(700, sampling=Sampling(max_tokens=2, num_choices=16)))
    is_over.set()
    thread.join()
    assert counted.input_tokens > 160_000
    assert max(gaps) < max(0.25 * seconds, 0.5)


@pytest.mark.parametrize(
    ("bounds", "why"), [({"PREPARE_SECONDS": 1.0}, "seconds"), ({"MEMORY_BYTES": 2**26}, "memory")]
)
async def test_a_prompt_that_takes_too_much_is_given_up_and_its_worker_replaced(
    bounds: dict[str, Any], why: str
) -> None:
    async with backend(**bounds) as engine:
        # Where others take the processor, time says nothing of a prompt: it is to come again.
        with pytest.raises(TooCostly, match=why):
            for _ in range(20):
                with suppress(Overloaded):
                    await engine.open(request(WORDS * 400_000))
        await finish(engine, request())


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_prompt_whose_workers_are_killed_or_stopped_is_prepared_by_another(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second of them was a 400, as if the prompt had been too costly."""
    ask = worker_process._ask
    num_left = worker_process.MAX_TRIES - 1

    async def interrupted_ask(process: asyncio.subprocess.Process, message: Start | Job) -> Answer:
        nonlocal num_left
        if isinstance(message, Job) and num_left:
            num_left -= 1
            process.send_signal(number)
        return await ask(process, message)

    monkeypatch.setattr(worker_process, "_ask", interrupted_ask)
    async with backend(PREPARE_SECONDS=3.0) as engine:
        await finish(engine, request())
        assert not num_left
        if number == signal.SIGKILL:
            num_left = worker_process.MAX_TRIES
            with pytest.raises(Overloaded, match="killed or stopped"):
                await engine.open(request())
            await finish(engine, request())


async def test_workers_have_a_group_of_their_own_and_those_that_die_at_rest_are_replaced(
    engine: LocalBackend,
) -> None:
    """Steps have the processor before workers: niceness counts only within a session, where Linux
    groups processes by session. A terminal's signals are the engine's."""
    await finish(engine, request())
    for child in children():
        assert os.getpriority(os.PRIO_PROCESS, child) > os.getpriority(os.PRIO_PROCESS, 0)
        assert os.getsid(child) == os.getsid(0)
        assert os.getpgid(child) != os.getpgid(0)
    await kill_workers(engine)
    await finish(engine, request())


async def test_long_requests_of_fresh_scopes_never_hold_the_last_worker() -> None:
    """They compile nothing, and no scope was slow yet: two of them held all workers."""
    long = WORDS * 200_000
    async with backend() as engine:
        tasks = [
            asyncio.create_task(engine.count(CountRequest(letter * 32, prompt(long))))
            for letter in "cdefghij"
        ]
        await asyncio.sleep(0.1)
        for _ in range(5):
            await engine.count(counting("hello"))
            assert not any(task.done() for task in tasks)
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await finish(engine, request())


async def test_an_engine_that_is_ready_has_its_last_worker() -> None:
    async with backend() as engine:
        assert len([worker for worker in workers(engine) if worker._process is not None]) == 2


async def test_a_cancelled_count_stops_its_worker(engine: LocalBackend) -> None:
    await finish(engine, request())
    count = asyncio.ensure_future(engine.count(counting(WORDS * 300_000)))
    running = [worker._process for worker in workers(engine) if worker._process is not None]
    await asyncio.sleep(0.3)
    count.cancel()
    await finish(engine, request())
    assert count.cancelled()
    await until(lambda: any(process.returncode is not None for process in running))


async def test_a_grammar_is_compiled_once_for_all_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    renderer = ChatRenderer.from_model(DEMO_MODEL)
    assert renderer._writer is not None
    compiled: list[str] = []
    compile_one = renderer._writer._compile
    monkeypatch.setattr(
        type(renderer._writer),
        "_compile",
        lambda self, grammar: (compiled.append(grammar), compile_one(grammar))[1],
    )
    parsers = renderer.parsers(forced(20, sampling=Sampling(max_tokens=2, num_choices=16)))
    assert len(compiled) == 1 and len(parsers) == 16
    masks = {bytes(parser.allowed or b"") for parser in parsers}
    assert len(masks) == 1 and masks != {b""}


def test_clients_that_leave_while_a_worker_starts_do_not_start_it_again_and_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the event loop that vLLM's server runs in."""

    started: list[int] = []
    spawn = asyncio.create_subprocess_exec

    async def spawned(*arguments: Any, **more: Any) -> asyncio.subprocess.Process:
        process = await spawn(*arguments, **more)
        started.append(process.pid)
        return process

    monkeypatch.setattr(asyncio, "create_subprocess_exec", spawned)
    # On a busy machine a worker may take longer than usual, and would be started a second time.
    monkeypatch.setattr(worker_process, "START_SECONDS", 600.0)

    async def run() -> None:
        async with backend() as engine:
            for number in range(6):
                opening = asyncio.ensure_future(engine.open(request(request_id=f"left-{number}")))
                await asyncio.sleep(0.02)
                opening.cancel()
                await asyncio.gather(opening, return_exceptions=True)
            await finish(engine, request(request_id="stays"))
            # One that answered was started once; another may still be on its way.
            assert len(started) <= len(workers(engine))

            def have_own_groups() -> bool:
                return all(
                    os.getpgid(worker._process.pid) == worker._process.pid
                    for worker in workers(engine)
                    if worker._process is not None
                )

            # A worker that is still starting leaves the engine's group a moment later.
            await until(have_own_groups)

    uvloop.run(run())


async def test_a_backend_that_stops_while_a_worker_starts_leaves_no_process() -> None:
    before = set(children())
    async with backend() as engine:
        opening = asyncio.ensure_future(engine.open(request()))
        await until(lambda: set(children()) > before)
        opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert set(children()) <= before
