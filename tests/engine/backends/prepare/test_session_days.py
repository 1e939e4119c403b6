"""The day that a template writes: one for a session's prefix, by real workers and a real cache.

The template of these tests writes a word for each day of the month, so a prompt's length tells the
day that it was rendered with.
"""

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from engine.backends.local import LocalBackend
from engine.backends.prepare import session_days
from engine.backends.prepare.pool import PreparePool
from engine.backends.prepare.session_days import SessionDays
from engine.clock import ManualClock
from engine.protocol import Breakpoint, CountRequest, Sampling, Started, Tool
from engine.settings import DEMO_MODEL
from engine.text.files import read_prompt_files
from engine.text.rendered import DatedBeginning, KnownDays, beginning_of
from engine.text.renderer import ChatRenderer
from tests.engine.backends.local import SCOPE, prompt, request, serving
from tests.engine.backends.prepare.test_workers import kill_workers
from tests.engine.text.templates import demo_renderer, renderer_of
from tests.engine.text.test_boundaries import agent_prompt

pytestmark = pytest.mark.anyio

DATED = "{% for _ in range(strftime_now('%d') | int) %}day {% endfor %}\n"
OLD = date(2026, 1, 31)
NEW = date(2026, 2, 1)
SYSTEM = ("You answer in few words. " * 40,)
HOUR = 3600.0


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demonstration model's tokenizer behind a template that writes the date."""
    folder = tmp_path_factory.mktemp("days") / "dated"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    template = folder / "chat_template.jinja"
    template.write_text(DATED + template.read_text("utf-8"), "utf-8")
    return folder


@cache
def num_others(model: Path) -> int:
    """The tokens of a prompt of one question that are no day."""
    dated = ChatRenderer(read_prompt_files(str(model)))
    dated_prompt = prompt("q", system=SYSTEM)
    one_day, two_days = (
        len(dated.render(dated_prompt, thinking=False, days=KnownDays(f"2026-01-0{day}")).token_ids)
        for day in (1, 2)
    )
    assert two_days - one_day == 1, "one more token a day"
    return one_day - 1


@dataclass
class Engine:
    model: Path
    today: date = OLD
    num_requests: int = 0
    backend: LocalBackend = field(init=False)

    async def ask(self, *texts: str, **changes: Any) -> Started:
        self.num_requests += 1
        fields: dict[str, Any] = {
            "of": prompt(*texts, system=SYSTEM),
            "breakpoints": [Breakpoint(0, "1h"), Breakpoint(len(texts), "1h")],
            "request_id": f"r{self.num_requests}",
            "sampling": Sampling(max_tokens=1),
        }
        generate_request = request(**fields | changes)
        frames = [
            frame async for frame in await self.backend.open(generate_request) if frame is not None
        ]
        assert isinstance(frames[0], Started)
        return frames[0]

    async def days(self) -> int:
        """The day of the month that a prompt with the same beginning is rendered with."""
        counted = await self.backend.count(CountRequest(SCOPE, prompt("q", system=SYSTEM)))
        return counted.input_tokens - num_others(self.model)


@asynccontextmanager
async def engine(
    model: Path, renderer: ChatRenderer | None = None, **settings: Any
) -> AsyncIterator[Engine]:
    running = Engine(model)
    values = {"model": str(model), **settings}
    async with serving(renderer, today=lambda: running.today, **values) as running.backend:
        yield running


async def test_a_session_keeps_its_day_until_its_lease_ends_on_any_worker(model: Path) -> None:
    async with engine(model) as running:
        first = await running.ask("Where is it?")
        written_tokens = first.usage.cache_write_1h_tokens
        assert written_tokens > 200 and not first.usage.cache_read_tokens
        running.today = NEW
        await running.backend.advance_clock(120)
        await kill_workers(running.backend)
        second = await running.ask("Where is it?", "There.", "And now?")
        assert second.usage.cache_read_tokens == written_tokens
        assert await running.days() == 31
        for _ in range(3):  # each use keeps the day for an hour more
            await running.backend.advance_clock(HOUR - 60)
            again = await running.ask("Where is it?")
            assert again.usage.cache_read_tokens == written_tokens
        await running.backend.advance_clock(HOUR + 61)
        assert await running.days() == 1
        late = await running.ask("Where is it?")
        assert not late.usage.cache_read_tokens
        assert first.usage.prompt_tokens - late.usage.prompt_tokens == 30
        # An entry with a longer lifetime of its own keeps its day as long.
        point = Breakpoint(0, "1h", seconds=5 * HOUR)
        await running.ask("Where is it?", breakpoints=[point])
        running.today = OLD
        await running.backend.advance_clock(4 * HOUR)
        next_day = await running.ask("What else?", breakpoints=[point])
        assert next_day.usage.cache_read_tokens > 0 and await running.days() == 1


async def test_segments_that_end_within_a_token_are_told_where_they_are_marked(model: Path) -> None:
    spans = renderer_of("qwen3").render(agent_prompt(), thinking=False).segments
    inexact = next(index for index, span in enumerate(spans) if not span.is_exact)
    exact = next(index for index, span in enumerate(spans) if span.is_exact and span.end)
    points = [Breakpoint(inexact), Breakpoint(exact)]
    async with engine(model, renderer_of("qwen3")) as running:
        started = await running.ask(of=agent_prompt(), breakpoints=points, min_cache_tokens=1)
        assert started.inexact == [inexact]
        assert {report.segment for report in started.breakpoints} == {inexact, exact}
        assert (await running.ask("q", breakpoints=[])).inexact == []


async def test_of_two_first_uses_at_midnight_the_first_decides() -> None:
    memory = SessionDays(ManualClock(), lambda: NEW, seconds=HOUR)
    for day in ("2026-01-31", "2026-02-01"):
        memory.note("s", DatedBeginning(b"b", day))
    assert memory.known("s").day_of(b"b") == "2026-01-31"


async def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_days, "MAX_SCOPE_BEGINNINGS", 4)
    monkeypatch.setattr(session_days, "MAX_BEGINNINGS", 10)
    memory = SessionDays(ManualClock(), lambda: NEW, seconds=HOUR)

    def use(beginning: bytes, scope: str = "s") -> None:
        memory.note(scope, DatedBeginning(beginning, "2026-01-31"))

    for index in range(9):
        use(b"%d" % index)
        use(b"0")
    use(b"other", "t")
    assert set(memory.known("s").earlier) == {b"0", b"6", b"7", b"8"}
    assert set(memory.known("t").earlier) == {b"other"}
    for index in range(50):
        use(b"b", f"scope {index}")
    known = [memory.known(f"scope {index}").earlier for index in range(50)]
    assert sum(map(len, known)) == 10
    assert not memory.known("s").earlier


async def test_a_beginning_is_the_scopes_tools_and_system_prompt() -> None:
    def begun(*texts: str, tool: str = "t", system: str = "s", scope: str = SCOPE) -> bytes:
        return beginning_of(prompt(*texts, system=(system,), tools=[Tool(tool, {})]), scope)

    assert begun("q") == begun("q", "a", "q")
    assert len({begun("q"), begun(scope="b"), begun("q", tool="u"), begun("q", system="S")}) == 4


async def test_templates_that_write_no_date_are_told_no_day(model: Path) -> None:
    assert not demo_renderer().writes_date
    rendered = demo_renderer().render(agent_prompt(), thinking=False, days=KnownDays("2026-01-31"))
    assert rendered.dated is None
    async with engine(Path(DEMO_MODEL)) as running:
        pool = running.backend._ready().preparation
        assert isinstance(pool, PreparePool) and pool._days is None


async def test_a_lease_of_twelve_hours_keeps_its_day_for_as_long(model: Path) -> None:
    async with engine(model) as running:
        await running.ask("Where is it?", breakpoints=[Breakpoint(0, "12h")])
        running.today = NEW
        await running.backend.advance_clock(12 * HOUR - 60)
        assert await running.days() == 31
        await running.backend.advance_clock(121)
        assert await running.days() == 1
