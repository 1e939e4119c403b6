"""What a request costs an engine grows no faster than the request, in every dimension.

From the body to the first frame: decode, check, render, tokenize (the worker's part, in this
process), query, parsers, look-up, schedule, first token. The renderer is the demo model's own, the
model is none. Three sizes of each dimension, the last at its bound or within a long context.
"""

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import msgspec
import pytest

from engine.backends.prepare.checks import MAX_STOPS
from engine.backends.prepare.prepared import GENERATE, Job, Prepared
from engine.backends.prepare.preparer import Preparer
from engine.backends.prepare.schemas import MAX_SCHEMA_PROPERTIES
from engine.backends.queries import new_samples, query_of
from engine.backends.synthetic import SyntheticRunner
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import PrefixCache
from engine.clock import ManualClock
from engine.protocol import (
    Breakpoint,
    Frame,
    GenerateRequest,
    Message,
    Name,
    Part,
    Prompt,
    Sampling,
    Started,
    TextPart,
    ThinkingPart,
    Tool,
    ToolChoice,
)
from engine.schedule.accounting import Accounting
from engine.schedule.loop import EngineLoop
from engine.schedule.request import RequestState
from engine.schedule.scheduler import Scheduler
from engine.settings import DEMO_MODEL
from engine.text.renderer import ChatRenderer
from tests.doubling import GROWTH, Dimension, curve_of, row
from tests.engine.backends.local import description, request

CONTEXT = 1 << 18
BLOCK = 16


class OneEngine:
    """All of an engine in one thread: `serve` takes a body as far as its first frame."""

    def __init__(self) -> None:
        self.renderer = ChatRenderer.from_model(DEMO_MODEL)
        self.description = description(
            max_context_tokens=CONTEXT,
            num_blocks=2 * CONTEXT // BLOCK,
            min_cache_tokens=32,
            capabilities=[
                "multiple_choices",
                "tools",
                "forced_tools",
                "structured_output",
                "thinking",
            ],
        )
        self._preparer = Preparer(self.renderer, self.description)
        self._numbers = count()

    def serve(self, body: bytes) -> None:
        """A new pool each time: no run finds what the one before it left."""
        pool = BlockPool(self.description.num_blocks, BLOCK)
        cache = PrefixCache(pool, Entries(pool, lease_share=0.5), ChainHasher(b"k", BLOCK))
        clock = ManualClock()
        scheduler = Scheduler(cache, max_step_tokens=CONTEXT, max_running=64)
        accounting = Accounting(
            cache, clock, lambda _events: None, epoch="e", max_context_tokens=CONTEXT
        )
        runner = SyntheticRunner(
            prefill_seconds=0, decode_seconds=0, copy_seconds=0, sleep=lambda _seconds: None
        )
        loop = EngineLoop(scheduler, accounting, runner, max_waiting=64)
        answer = self._preparer.answer(Job(GENERATE, body))
        assert isinstance(answer, Prepared), answer
        generate_request = msgspec.json.decode(answer.request, type=GenerateRequest)
        query = query_of(
            generate_request, answer, cache, self.description, lambda *_: None, arrived_at=0.0
        )
        frames: list[Frame] = []
        state = RequestState(
            request=generate_request,
            query=query,
            parsers=self.renderer.parsers(generate_request),
            emit=frames.append,
            submitted_at=0.0,
        )
        loop.submit(state, new_samples(generate_request, self.description))
        while not frames:
            loop.step()
        assert isinstance(frames[0], Started)
        loop.stop()

    def ask(self, prompt: Prompt, **changes: Any) -> Callable[[], None]:
        """What serves such a request; each run's texts are new to the tokenizer's memory."""

        def run() -> None:
            scope = f"{next(self._numbers):032x}"
            self.serve(msgspec.json.encode(request(prompt, scope=scope, **changes)))

        return run


ENGINE = OneEngine()


def words(size: int) -> str:
    return "".join(f"w{n % 997} " for n in range(size))


def said(*parts: Part, tools: list[Tool] | None = None) -> Prompt:
    return Prompt([Message("user", list(parts))], tools=tools or [])


def schema(size: int) -> dict[str, Any]:
    names = [f"p{n}" for n in range(size)]
    properties = {name: {"type": "string"} for name in names}
    return {"type": "object", "properties": properties, "required": names}


def texts(size: int, text: Callable[[int], str]) -> list[Part]:
    return [TextPart(text(n)) for n in range(size)]


def thinking_blocks(size: int) -> Callable[[], None]:
    parts: list[Part] = [ThinkingPart(f"t{n}") for n in range(size)]
    question = Message("user", [TextPart("q")])
    return ENGINE.ask(Prompt([question, Message("assistant", [*parts, TextPart("a")]), question]))


def messages(size: int) -> Callable[[], None]:
    roles: Any = ("user", "assistant")
    turns = [Message(roles[n % 2], [TextPart(f"m{n}")]) for n in range(size + 1 - size % 2)]
    return ENGINE.ask(Prompt(turns))


def properties(size: int, **more: Any) -> Callable[[], None]:
    return ENGINE.ask(said(TextPart("q"), tools=[Tool("t", schema(size))]), **more)


def tools(size: int) -> Callable[[], None]:
    definitions = [Tool(f"tool_{n}", schema(2), f"does {n}") for n in range(size)]
    return ENGINE.ask(said(TextPart("q"), tools=definitions))


def choices(size: int) -> Callable[[], None]:
    prompt = said(TextPart(words(400)), tools=[Tool("t", schema(64))])
    sampling = Sampling(max_tokens=2, num_choices=size)
    return ENGINE.ask(prompt, tool_choice=ToolChoice("any"), sampling=sampling)


def stops(size: int) -> Callable[[], None]:
    sampling = Sampling(max_tokens=2, stop_sequences=[f"stop {n} here" for n in range(size)])
    return ENGINE.ask(said(TextPart("q")), sampling=sampling)


def marks(size: int) -> Callable[[], None]:
    points = [Breakpoint(100 * (n + 1) - 1) for n in range(size)]
    return ENGINE.ask(said(*texts(400, lambda _: words(60))), breakpoints=points)


def names(size: int) -> Callable[[], None]:
    prefix_names = [Name(f"{n:016x}", n) for n in range(size)]
    return ENGINE.ask(said(*texts(512, lambda _: words(10))), names=prefix_names)


DIMENSIONS = (
    Dimension("bytes of text", 262_144, lambda size: ENGINE.ask(said(TextPart(words(size // 5))))),
    Dimension("blocks", 8_192, lambda size: ENGINE.ask(said(*texts(size, "b{}".format)))),
    Dimension("thinking blocks that the template drops", 16_384, thinking_blocks),
    Dimension("messages", 4_096, messages),
    Dimension("tools", 2_048, tools),
    Dimension("properties of a tool", 8_192, properties),
    Dimension(
        "properties that constrain the output",
        MAX_SCHEMA_PROPERTIES,
        partial(properties, tool_choice=ToolChoice("any")),
    ),
    Dimension("choices", 16, choices),
    Dimension("stop strings", MAX_STOPS, stops),
    Dimension("markers", 4, marks),
    Dimension("names", 512, names),
)


@pytest.mark.parametrize("dimension", DIMENSIONS, ids=lambda dimension: dimension.name)
def test_a_doubled_dimension_costs_an_engine_no_more_than_twice_as_much(
    dimension: Dimension,
) -> None:
    curve = curve_of(dimension)
    print(row(curve))
    assert curve.growth <= GROWTH


def test_what_is_matched_costs_the_same_however_many_stop_strings_there_are() -> None:
    """Counted, not timed: one step of the automaton a character, but for amortized falls."""
    from engine.text.formats.matching import StopState, StopStrings

    class Counting(StopStrings):
        steps = 0

        def step(self, state: StopState, character: str) -> StopState:
            type(self).steps += 1
            return super().step(state, character)

    text = words(500)
    for size in (1, 32, 1024):
        automaton = Counting([f"w{n} never" for n in range(size)])
        Counting.steps = 0
        state = automaton.start
        for character in text:
            state = automaton.step(state, character)
        assert Counting.steps == len(text)
