"""The day that a template writes: one for a session's prefix, by real workers and a real cache.

The template of these tests writes a word for each day of the month, so a prompt's length tells the
day that it was rendered with.
"""

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from engine.backends.base import Parts
from engine.backends.looped import LoopedBackend
from engine.backends.prepare import pool as preparation
from engine.backends.prepare.pool import PreparePool, SessionDays
from engine.backends.prepare.renderers import chat_renderer, chat_worker
from engine.backends.synthetic import SyntheticRunner
from engine.clock import ManualClock
from engine.protocol import (
    Breakpoint,
    CountRequest,
    Description,
    GenerateRequest,
    Message,
    Prompt,
    Sampling,
    Started,
    TextPart,
    Tool,
)
from engine.settings import DEMO_MODEL, Settings
from engine.text.rendered import DatedBeginning, KnownDays, beginning_of
from engine.text.renderer import ChatRenderer
from tests.engine.backends.prepare.test_workers import ended_workers
from tests.engine.text.templates import QWEN, demo_renderer, renderer_for
from tests.engine.text.test_boundaries import agent_prompt

pytestmark = pytest.mark.anyio

SCOPE, OTHER = "a" * 32, "b" * 32
DATED = "{% for _ in range(strftime_now('%d') | int) %}day {% endfor %}\n"
OLD, NEW = date(2026, 1, 31), date(2026, 2, 1)
SYSTEM = "You answer in few words. " * 40
HOUR = 3600.0


def new_model(folder: Path) -> str:
    """The demonstration model's tokenizer behind a template that writes the date."""
    model = folder / "dated"
    shutil.copytree(DEMO_MODEL, model, ignore=shutil.ignore_patterns("*.safetensors"))
    template = model / "chat_template.jinja"
    template.write_text(DATED + template.read_text("utf-8"), "utf-8")
    return str(model)


def parts_of(settings: Settings, renderer: ChatRenderer | None) -> Parts:
    worker = None if renderer is not None else chat_worker(settings)
    description = Description(
        backend="native",
        model="dated",
        epoch="",
        max_context_tokens=8192,
        block_size=16,
        num_blocks=2048,
        granularity=1,
        min_cache_tokens=32,
        capabilities=["copy_on_write", "tools"],
    )
    runner = SyntheticRunner(
        prefill_seconds=0, decode_seconds=0, copy_seconds=0, sleep=lambda _seconds: None
    )
    return Parts(
        runner=runner,
        renderer=renderer or chat_renderer(chat_worker(settings)),
        description=description,
        step_tokens=4096,
        block_bytes=1,
        worker=worker,
    )


@dataclass
class Engine:
    backend: LoopedBackend
    today: date = OLD
    num_requests: int = 0

    async def ask(self, *texts: str, scope: str = SCOPE, **given: Any) -> Started:
        self.num_requests += 1
        turns = [
            Message("assistant" if index % 2 else "user", [TextPart(text)])
            for index, text in enumerate(texts)
        ]
        prompt = Prompt(turns, system=[TextPart(SYSTEM)])
        fields: dict[str, Any] = {
            "prompt": prompt,
            "breakpoints": [Breakpoint(0, "1h"), Breakpoint(len(texts), "1h")],
        }
        request = GenerateRequest(
            request_id=f"r{self.num_requests}",
            scope=scope,
            sampling=Sampling(max_tokens=1),
            **(fields | given),
        )
        frames = [frame async for frame in await self.backend.open(request) if frame is not None]
        assert isinstance(frames[0], Started)
        return frames[0]

    async def days(self, scope: str = SCOPE) -> int:
        """The day of the month that a prompt with the same beginning is rendered with."""
        prompt = Prompt([Message("user", [TextPart("q")])], system=[TextPart(SYSTEM)])
        counted = await self.backend.count(CountRequest(scope, prompt))
        return counted.input_tokens - self.num_others

    num_others: int = 0


@asynccontextmanager
async def engine(
    folder: Path, renderer: ChatRenderer | None = None, **given: Any
) -> AsyncIterator[Engine]:
    settings = Settings.model_validate(
        {
            "secret": "s" * 16,
            "model": new_model(folder),
            "prepare_workers": 2,
            **given,
        }
    )
    crashes: list[BaseException] = []
    backend = LoopedBackend(
        settings,
        ManualClock(),
        lambda settings, _progress: parts_of(settings, renderer),
        crashes.append,
        today=lambda: made.today,
    )
    made = Engine(backend)
    with patch.multiple(preparation, PREPARE_SECONDS=60.0, WAIT_SECONDS=60.0):
        await asyncio.to_thread(backend.load, lambda _stage, _fraction: None)
    prompt = Prompt([Message("user", [TextPart("q")])], system=[TextPart(SYSTEM)])
    dated = chat_renderer(chat_worker(settings))
    token_ids = dated.render(prompt, thinking=False, days=KnownDays("2026-01-01")).token_ids
    others = dated.render(prompt, thinking=False, days=KnownDays("2026-01-02")).token_ids
    assert len(others) - len(token_ids) == 1, "one more token a day"
    made.num_others = len(token_ids) - 1
    try:
        yield made
    finally:
        await backend.stop()
    assert not crashes


def end_workers() -> None:
    """New ones come in their place, which rendered nothing before."""
    of = Path(f"/proc/self/task/{os.getpid()}/children").read_text("ascii").split()
    for child in map(int, of):
        if b"prepare.worker" in Path(f"/proc/{child}/cmdline").read_bytes():
            os.kill(child, signal.SIGKILL)


async def test_a_session_reads_its_prefix_over_midnight_whichever_worker_renders_it(
    tmp_path: Path,
) -> None:
    async with engine(tmp_path) as made:
        first = await made.ask("Where is it?")
        written = first.usage.cache_write_1h_tokens
        assert written > 200 and not first.usage.cache_read_tokens
        made.today = NEW
        await made.backend.advance_clock(120)
        end_workers()
        await ended_workers(made.backend)
        second = await made.ask("Where is it?", "There.", "And now?")
        assert second.usage.cache_read_tokens == written
        assert await made.days() == 31


async def test_after_its_lease_a_prefix_is_written_with_the_new_day(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        first = await made.ask("Where is it?")
        made.today = NEW
        for _ in range(3):  # each use keeps the day for an hour more
            await made.backend.advance_clock(HOUR - 60)
            again = await made.ask("Where is it?")
            assert again.usage.cache_read_tokens == first.usage.cache_write_1h_tokens
        await made.backend.advance_clock(HOUR + 61)
        assert await made.days() == 1
        late = await made.ask("Where is it?")
        assert not late.usage.cache_read_tokens
        assert first.usage.prompt_tokens - late.usage.prompt_tokens == 30


async def test_an_entry_with_a_longer_lifetime_of_its_own_keeps_its_day(tmp_path: Path) -> None:
    async with engine(tmp_path) as made:
        point = Breakpoint(0, "1h", seconds=5 * HOUR)
        first = await made.ask("Where is it?", breakpoints=[point])
        made.today = NEW
        await made.backend.advance_clock(4 * HOUR)
        second = await made.ask("What else?", breakpoints=[point])
        assert second.usage.cache_read_tokens == first.usage.cache_write_1h_tokens > 0


@pytest.mark.parametrize(("setting", "expected"), [("2026-01-07", 7), ("20260109", 9)])
async def test_a_fixed_day_is_the_day_of_every_prompt(
    tmp_path: Path, setting: str, expected: int
) -> None:
    async with engine(tmp_path, template_date=setting) as made:
        assert await made.days() == expected
        made.today = NEW
        assert await made.days() == expected


async def test_segments_that_end_within_a_token_are_told_where_they_are_marked(
    tmp_path: Path,
) -> None:
    prompt = agent_prompt()
    spans = renderer_for(QWEN).render(prompt, thinking=False).segments
    inexact = next(index for index, span in enumerate(spans) if not span.is_exact)
    exact = next(index for index, span in enumerate(spans) if span.is_exact and span.end)
    points = [Breakpoint(inexact), Breakpoint(exact)]
    async with engine(tmp_path, renderer_for(QWEN)) as made:
        told = await made.ask(prompt=prompt, breakpoints=points, min_cache_tokens=1)
        assert told.inexact == [inexact]
        assert {report.segment for report in told.breakpoints} == {inexact, exact}
        assert (await made.ask("q", breakpoints=[])).inexact == []


class Days:
    """A memory with a clock and a day that tests move."""

    def __init__(self) -> None:
        self.clock = ManualClock()
        self.today = OLD
        self.memory = SessionDays(self.clock, lambda: self.today, seconds=HOUR)

    def use(self, beginning: bytes, scope: str = "s", seconds: float = 0.0) -> None:
        day = self.memory.known(scope).day_of(beginning)
        self.memory.note(scope, DatedBeginning(beginning, day), seconds)


async def test_of_two_first_uses_at_midnight_the_first_decides() -> None:
    days = Days()
    for day in ("2026-01-31", "2026-02-01"):
        days.memory.note("s", DatedBeginning(b"b", day))
    days.today = NEW
    assert days.memory.known("s").day_of(b"b") == "2026-01-31"


async def test_what_is_remembered_is_bounded_by_scope_and_in_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(preparation, "MAX_SCOPE_BEGINNINGS", 4)
    monkeypatch.setattr(preparation, "MAX_BEGINNINGS", 10)
    days = Days()
    for index in range(9):
        days.use(b"%d" % index)
        days.use(b"0")
    days.use(b"other", "t")
    days.today = NEW
    assert set(days.memory.known("s").earlier) == {b"0", b"6", b"7", b"8"}
    assert set(days.memory.known("t").earlier) == {b"other"}
    for index in range(50):
        days.use(b"b", f"scope {index}")
    assert len(days.memory) == 10
    assert not days.memory.known("s").earlier


async def test_a_beginning_is_the_scopes_tools_and_system_prompt() -> None:
    turns = [Message("user", [TextPart("q")])]
    prompt = Prompt(turns, [Tool("t", {})], [TextPart("s")])
    same = Prompt([*turns, *turns], [Tool("t", {})], [TextPart("s")])
    assert beginning_of(prompt, SCOPE) == beginning_of(same, SCOPE)
    others = [
        beginning_of(prompt, OTHER),
        beginning_of(Prompt(turns, [Tool("u", {})], [TextPart("s")]), SCOPE),
        beginning_of(Prompt(turns, [Tool("t", {})], [TextPart("S")]), SCOPE),
    ]
    assert len({beginning_of(prompt, SCOPE), *others}) == 4


async def test_templates_that_write_no_date_are_told_no_day(tmp_path: Path) -> None:
    assert not demo_renderer().writes_date
    rendered = demo_renderer().render(agent_prompt(), thinking=False, days=KnownDays("2026-01-31"))
    assert rendered.dated is None
    async with engine(tmp_path, demo_renderer()) as made:
        pool = made.backend._ready().preparation
        assert isinstance(pool, PreparePool) and pool._days is None
