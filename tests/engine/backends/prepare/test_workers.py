"""Real worker processes over the demo model's real renderer, driven by the real backend."""

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engine.backends.base import Parts
from engine.backends.looped import LoopedBackend
from engine.backends.prepare import pool as preparation
from engine.backends.prepare.pool import WorkerProcess
from engine.backends.prepare.renderers import chat_worker
from engine.backends.synthetic import SyntheticRunner
from engine.clock import MonotonicClock
from engine.errors import InvalidRequest, PromptTooLong, SchemaRefused, TooCostly
from engine.protocol import (
    CountRequest,
    Description,
    Done,
    GenerateRequest,
    Message,
    Prompt,
    Sampling,
    TextPart,
    Tool,
    ToolChoice,
)
from engine.settings import DEMO_MODEL, Settings
from engine.text.renderer import ChatRenderer

pytestmark = pytest.mark.anyio

SCOPE = "a" * 32
OTHER = "b" * 32


class Beat:
    """A thread that wants the interpreter's lock every millisecond; `longest_gap` in seconds."""

    def __init__(self) -> None:
        self.longest_gap = 0.0
        self._is_over = False

    def run(self) -> None:
        last = time.perf_counter()
        while not self._is_over:
            time.sleep(0.001)
            now = time.perf_counter()
            self.longest_gap = max(self.longest_gap, now - last)
            last = now

    def end(self) -> None:
        self._is_over = True


@contextmanager
def beating() -> Iterator[Beat]:
    beat = Beat()
    thread = threading.Thread(target=beat.run)
    thread.start()
    try:
        yield beat
    finally:
        beat.end()
        thread.join()


def load(settings: Settings, context: int, longest: int) -> Parts:
    """The demo model's own renderer before a runner that computes nothing."""
    renderer = ChatRenderer.from_model(DEMO_MODEL)
    description = Description(
        backend="native",
        model="demo",
        epoch="",
        max_context_tokens=context,
        block_size=16,
        num_blocks=context // 8,
        granularity=1,
        min_cache_tokens=32,
        capabilities=[
            "copy_on_write",
            "multiple_choices",
            "tools",
            "forced_tools",
            "structured_output",
        ],
        longest_token_bytes=longest,
    )
    runner = SyntheticRunner(
        prefill_seconds=0, decode_seconds=0, copy_seconds=0, sleep=lambda _seconds: None
    )
    return Parts(
        runner=runner,
        renderer=renderer,
        description=description,
        step_tokens=4096,
        block_bytes=1,
        worker=chat_worker(settings),
    )


@asynccontextmanager
async def backend(
    *, context: int = 1 << 20, longest: int = 93, workers: int = 2, **bounds: Any
) -> AsyncIterator[LoopedBackend]:
    """`bounds` are constants of `preparation`."""
    settings = Settings.model_validate(
        {"secret": "s" * 16, "model": DEMO_MODEL, "prepare_workers": workers}
    )
    crashes: list[Exception] = []
    made = LoopedBackend(
        settings,
        MonotonicClock(),
        lambda settings, _progress: load(settings, context, longest),
        crashes.append,
    )
    with patch.multiple(preparation, **bounds) if bounds else nullcontext():
        await asyncio.to_thread(made.load, lambda _stage, _fraction: None)
    try:
        yield made
    finally:
        await made.stop()
    assert not crashes


def ask(text: str = "hello", request_id: str = "r", **given: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "prompt": Prompt([Message("user", [TextPart(text)])]),
        "sampling": Sampling(max_tokens=2),
        "scope": SCOPE,
    }
    return GenerateRequest(request_id=request_id, **(fields | given))


async def finish(engine: LoopedBackend, request: GenerateRequest) -> None:
    frames = [frame async for frame in await engine.open(request)]
    assert isinstance(frames[-1], Done)


def schema(num_properties: int) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {f"property_{i}": {"type": "string"} for i in range(num_properties)},
    }


def forced(num_properties: int, **given: Any) -> GenerateRequest:
    prompt = Prompt([Message("user", [TextPart("q")])], tools=[Tool("t", schema(num_properties))])
    return ask(prompt=prompt, tool_choice=ToolChoice("any"), **given)


async def test_neither_tokenizing_nor_compiling_keeps_another_thread_from_running() -> None:
    """About 500,000 tokens, which hold the interpreter's lock for seconds in one process."""
    text = "hello world this is some text 123 " * 40_000
    async with backend(PREPARE_SECONDS=60, WAIT_SECONDS=60) as engine:
        await finish(engine, ask())
        began = time.perf_counter()
        with beating() as beat:
            counted = await engine.count(ask_count(text))
            seconds = time.perf_counter() - began
            compiled = forced(700, request_id="f", sampling=Sampling(max_tokens=2, num_choices=16))
            with contextlib.suppress(InvalidRequest):
                await finish(engine, compiled)
        assert counted.input_tokens > 400_000
        print(f"prepared for {seconds:.2f} s; longest gap {beat.longest_gap * 1e3:.0f} ms")
        assert beat.longest_gap < max(0.25 * seconds, 0.5)


def ask_count(text: str) -> CountRequest:
    return CountRequest(SCOPE, Prompt([Message("user", [TextPart(text)])]))


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    async with backend(context=16_384) as engine:
        await finish(engine, ask())
        for request in (ask("x " * 8_000_000), ask_count("x " * 8_000_000)):
            began = time.process_time()
            with pytest.raises(PromptTooLong, match="172044 tokens > 16383"):
                if isinstance(request, GenerateRequest):
                    await engine.open(request)
                else:
                    await engine.count(request)
            assert time.process_time() - began < 1.0


async def test_a_prompt_that_takes_too_long_is_given_up_and_its_worker_replaced() -> None:
    async with backend(PREPARE_SECONDS=2.0, WAIT_SECONDS=60) as engine:
        await finish(engine, ask())
        with pytest.raises(TooCostly, match="seconds"):
            await engine.open(ask("hello world, what is it 12 " * 400_000, request_id="long"))
        await finish(engine, ask(request_id="next"))


async def test_a_prompt_that_takes_too_much_memory_ends_its_worker_alone() -> None:
    async with backend(MEMORY_BYTES=2**26, PREPARE_SECONDS=60, WAIT_SECONDS=60) as engine:
        await finish(engine, ask())
        with pytest.raises(TooCostly, match="memory"):
            await engine.open(ask("hello world, what is it 12 " * 400_000, request_id="big"))
        await finish(engine, ask(request_id="next"))


async def test_a_worker_that_dies_at_rest_is_replaced() -> None:
    async with backend() as engine:
        await finish(engine, ask())
        for child in children():
            os.kill(child, signal.SIGKILL)
        await ended_workers(engine)
        await finish(engine, ask(request_id="next"))


async def test_steps_of_the_engine_have_the_processor_before_workers() -> None:
    """Niceness counts only within a session, where Linux groups processes by session."""
    async with backend() as engine:
        await finish(engine, ask())
        for child in children():
            assert os.getpriority(os.PRIO_PROCESS, child) > os.getpriority(os.PRIO_PROCESS, 0)
            assert os.getsid(child) == os.getsid(0)
            assert os.getpgid(child) != os.getpgid(0), "a terminal's signals are the engine's"


@pytest.mark.parametrize("anyio_backend", [("asyncio", {"use_uvloop": True})], ids=["uvloop"])
async def test_workers_start_in_the_event_loop_that_vllms_server_runs_in() -> None:
    async with backend() as engine:
        assert type(asyncio.get_running_loop()).__module__ == "uvloop"
        await finish(engine, ask())
        assert all(os.getpgid(child) == child for child in children())


async def test_another_scope_is_served_while_one_holds_all_the_workers_it_may_have() -> None:
    text = "hello world this is some text 123 " * 120_000
    async with backend(PREPARE_SECONDS=60, WAIT_SECONDS=60) as engine:
        await asyncio.gather(
            finish(engine, ask()), finish(engine, ask(scope=OTHER, request_id="o"))
        )
        held = [asyncio.ensure_future(engine.open(ask(text, request_id=f"h{i}"))) for i in range(4)]
        await asyncio.sleep(0.3)
        await finish(engine, ask(scope=OTHER, request_id="other"))
        assert not any(task.done() for task in held)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)


async def test_a_cancelled_count_stops_its_worker() -> None:
    async with backend(PREPARE_SECONDS=60, WAIT_SECONDS=60, workers=1) as engine:
        await finish(engine, ask())
        counting = asyncio.ensure_future(engine.count(ask_count("hello world 123 " * 400_000)))
        await asyncio.sleep(0.3)
        counting.cancel()
        began = time.monotonic()
        await finish(engine, ask(request_id="next"))
        assert counting.cancelled()
        assert time.monotonic() - began < 20, "it would have taken longer than its replacement"


@pytest.mark.parametrize(
    ("request_of", "message"),
    [
        (lambda: forced(1025), r"tools\[0\].input_schema: 1025 properties of schemas > 1024"),
        (lambda: ask(output_schema=nested(70)), "output_schema: .* levels > 64"),
        (
            lambda: ask(output_schema={"enum": ["x" * 300_000]}),
            "output_schema: .* bytes of schemas > 262144",
        ),
    ],
)
async def test_a_schema_beyond_the_bounds_is_refused_by_name(request_of: Any, message: str) -> None:
    async with backend() as engine:
        with pytest.raises(SchemaRefused, match=message) as refused:
            await engine.open(request_of())
        assert refused.value.is_public


def nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(depth // 2):
        inner = {"type": "object", "properties": {"p": inner}}
    return inner


async def test_stop_strings_have_bounds() -> None:
    async with backend() as engine:
        for stops in (["x"] * 1025, ["x" * 70_000]):
            with pytest.raises(InvalidRequest, match="stop_sequences: at most"):
                await engine.open(ask(sampling=Sampling(max_tokens=2, stop_sequences=stops)))


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


async def test_what_a_client_cancels_between_submission_and_stream_is_cancelled_there() -> None:
    async with backend() as engine:
        await finish(engine, ask())
        for number in range(50):
            opening = asyncio.ensure_future(
                engine.open(ask(request_id=f"c{number}", sampling=Sampling(max_tokens=100_000)))
            )
            await asyncio.sleep(number * 0.0002)
            opening.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                (await opening).close()
        deadline = time.monotonic() + 180
        while (stats := await engine.stats()).running + stats.waiting:
            assert time.monotonic() < deadline, "a request that nobody reads runs on"
            await asyncio.sleep(0.05)


def workers(engine: LoopedBackend) -> list[WorkerProcess]:
    return engine._loaded.preparation._workers  # type: ignore[union-attr, attr-defined, no-any-return]


async def ended_workers(engine: LoopedBackend) -> None:
    """When the engine knows that its workers' processes have ended."""
    running = [worker._process for worker in workers(engine) if worker._process is not None]
    async with asyncio.timeout(180):
        while any(process.returncode is None for process in running):
            await asyncio.sleep(0.01)


def children() -> list[int]:
    """The worker processes of this one. There must be one."""
    found = all_children()
    assert found
    return found


def all_children() -> list[int]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            status = (path.parent / "stat").read_text().rsplit(")", 1)[1].split()
            if b"prepare.worker" in path.read_bytes() and int(status[1]) == os.getpid():
                found.append(int(path.parent.name))
    return found


async def test_clients_that_leave_while_a_worker_starts_do_not_start_it_again_and_again() -> None:
    async with backend() as engine:
        for number in range(6):
            opening = asyncio.ensure_future(engine.open(ask(request_id=f"left-{number}")))
            await asyncio.sleep(0.02)
            opening.cancel()
            await asyncio.gather(opening, return_exceptions=True)
        await finish(engine, ask(request_id="stays"))
        # One that answered was started once; another may still be on its way.
        assert max(worker.num_started for worker in workers(engine)) == 1
        assert len(children()) <= len(workers(engine))


async def test_a_backend_that_stops_while_a_worker_starts_leaves_no_process() -> None:
    async with backend() as engine:
        opening = asyncio.ensure_future(engine.open(ask()))
        while not all_children():
            await asyncio.sleep(0.01)
        opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert not all_children()
