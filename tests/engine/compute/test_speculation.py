"""Speculation by a real model: every request is answered as it is without; and what is proposed."""

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import anyio
import pytest

from engine.backends.base import Parts, Progress
from engine.backends.local import LocalBackend
from engine.backends.native import load_native
from engine.backends.prepare import pool
from engine.clock import MonotonicClock
from engine.compute.speculate import LEAST_MATCH, MOST_MATCH, NgramDrafter
from engine.protocol import (
    Breakpoint,
    Done,
    DrawnToken,
    Failed,
    Frame,
    GenerateRequest,
    InputUsage,
    Message,
    Prompt,
    Sampling,
    Started,
    TextDelta,
    TextPart,
    Tool,
    ToolChoice,
    ToolUseStart,
)
from engine.protocol.reports import Counters
from engine.settings import Settings

# What a grammar, biases or log-probabilities bind is decoded token by token, beside the others.
KINDS = ("text", "text", "stop", "choices", "choices", "logprobs", "penalties", "call", "schema")
BATCH = 8
NUM_REQUESTS = 3 * BATCH
CITY = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "Oslo"]},
        "days": {"type": "array", "items": {"enum": ["Monday", "Tuesday"]}, "maxItems": 5},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
SENTENCES = (
    "A lease holds a prefix until its time is over. ",
    "The cache is read to the token, and written to the token. ",
    "An entry without a lease is best-effort. ",
    '{"city": "Paris", "days": ["Monday", "Tuesday", "Monday"]} ',
)


@dataclass
class Told:
    """One choice's frames, its text's tokens with their log-probabilities apart."""

    frames: list[Frame] = field(default_factory=list)
    logprobs: list[DrawnToken] = field(default_factory=list)


@dataclass
class Answered:
    usage: InputUsage | None = None
    output_tokens: int = 0
    choices: dict[int, Told] = field(default_factory=dict)


Load = Callable[[Settings, Progress], Parts]


@asynccontextmanager
async def engine(load: Load = load_native, **settings: object) -> AsyncIterator[LocalBackend]:
    """A native engine of these settings, with its thread and without HTTP."""
    fixed = {"secret": "x" * 16, "log_level": "warning"}
    crashes: list[BaseException] = []
    whole = Settings.model_validate(fixed | settings)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "WAIT_SECONDS", 300.0)  # a busy machine starts workers slowly
        backend = LocalBackend(whole, MonotonicClock(), load, crashes.append)
        await asyncio.to_thread(backend.load, lambda _stage, _fraction: None)
    try:
        yield backend
    finally:
        await backend.stop()
        assert not crashes


async def ask_all(backend: LocalBackend, requests: Sequence[GenerateRequest]) -> list[Answered]:
    """All of them at once."""
    return list(await asyncio.gather(*(_ask(backend, request) for request in requests)))


async def _ask(backend: LocalBackend, request: GenerateRequest) -> Answered:
    answered = Answered()
    async for frame in await backend.open(request):
        match frame:
            case None:
                pass
            case Started():
                answered.usage = frame.usage
            case Done():
                answered.output_tokens = frame.output_tokens
            case TextDelta():
                choice = answered.choices.setdefault(frame.choice, Told())
                choice.frames.append(TextDelta(frame.text, frame.choice))
                choice.logprobs += frame.logprobs
            case Failed():
                raise AssertionError(frame.message)
            case _:
                answered.choices.setdefault(frame.choice, Told()).frames.append(frame)
    return answered


def new_request(rng: random.Random, name: str) -> GenerateRequest:
    """A prompt that repeats itself, and any of what a request may ask."""
    text = "".join(rng.choice(SENTENCES) for _ in range(rng.randint(2, 6)))
    kind = rng.choice(KINDS)
    greedy = rng.random() < 0.5
    sampling = Sampling(
        max_tokens=rng.randint(1, 40),
        temperature=0.0 if greedy else rng.choice([0.3, 0.8, 1.3]),
        top_p=rng.choice([0.5, 0.95, 1.0]),
        top_k=rng.choice([0, 3, 40]),
        seed=rng.randrange(1000),
        ignore_eos=rng.random() < 0.3 and kind not in ("call", "schema"),
        stop_sequences=["lease", " to the"] if kind == "stop" else [],
        logprobs=rng.randint(0, 3) if kind == "logprobs" else None,
        presence_penalty=0.7 if kind == "penalties" else 0.0,
        frequency_penalty=0.3 if kind == "penalties" else 0.0,
        logit_bias={5: -2.0, 77: 1.5} if kind == "penalties" else {},
        num_choices=3 if kind == "choices" else 1,
    )
    return GenerateRequest(
        request_id=name,
        scope="s" * 32,
        prompt=Prompt(
            [Message("user", [TextPart(f"{text}What is a lease?")])],
            [Tool("get_weather", CITY)] if kind == "call" else [],
            [TextPart(rng.choice(SENTENCES) * 3)],
        ),
        sampling=sampling,
        breakpoints=[Breakpoint(1 if kind == "call" else 0)],
        tool_choice=ToolChoice("tool", "get_weather") if kind == "call" else ToolChoice(),
        output_schema=CITY if kind == "schema" else None,
        service_class=rng.choice(["interactive", "interactive", "batch"]),
    )


async def answers(load: Load = load_native, **settings: object) -> tuple[list[Answered], Counters]:
    """The answers to the same requests, BATCH at a time, and what was counted."""
    rng = random.Random(1)
    answered = list[Answered]()
    async with engine(load, num_blocks=200, min_cache_tokens=16, **settings) as backend:
        for first in range(0, NUM_REQUESTS, BATCH):
            some = [new_request(rng, f"r{first + index}") for index in range(BATCH)]
            answered += await ask_all(backend, some)
        return answered, (await backend.stats()).counters


@pytest.fixture(scope="module")
def answer_pairs() -> tuple[list[Answered], list[Answered]]:
    plain, without = anyio.run(answers)
    speculated, counted = anyio.run(lambda: answers(speculation="ngram"))
    assert without.draft_tokens == 0 and without.sampling_steps == without.output_tokens
    assert counted.accepted_draft_tokens > 20, "nothing was tried"
    assert counted.output_tokens == without.output_tokens
    assert counted.sampling_steps + counted.accepted_draft_tokens >= counted.output_tokens
    return plain, speculated


def test_frames_are_the_same(answer_pairs: tuple[list[Answered], list[Answered]]) -> None:
    """Texts token by token, calls, reasons, stop strings, counts of tokens: greedy and seeded."""
    for plain, speculated in zip(*answer_pairs, strict=True):
        assert speculated.output_tokens == plain.output_tokens
        assert frames_of(speculated) == frames_of(plain)


def test_log_probabilities_are_the_same(
    answer_pairs: tuple[list[Answered], list[Answered]],
) -> None:
    num_compared = 0
    for plain, speculated in zip(*answer_pairs, strict=True):
        for choice, choice_answer in speculated.choices.items():
            plain_logprobs = plain.choices[choice].logprobs
            assert [probs(token) for token in choice_answer.logprobs] == [
                (token, pytest.approx(value, abs=1e-3))
                for token, value in map(probs, plain_logprobs)
            ]
            num_compared += len(plain_logprobs)
    assert num_compared > 20


def frames_of(answered: Answered) -> dict[int, list[object]]:
    """By choice. A call's id is made up anew each time."""
    return {
        choice: [
            (f.name, f.choice) if isinstance(f, ToolUseStart) else f for f in choice_answer.frames
        ]
        for choice, choice_answer in answered.choices.items()
    }


def probs(token: DrawnToken) -> tuple[int, float]:
    return token.drawn.token_id, token.drawn.logprob


def test_a_proposal_is_shorter_after_a_wrong_one_and_grows_back() -> None:
    drafter = NgramDrafter(8)
    tokens = [1, 2] * 20
    lengths = []
    for num_accepted in (8, 0, 1, 2, 4, 3):
        proposed = len(drafter.propose(tokens))
        lengths.append(proposed)
        drafter.verified(proposed, min(num_accepted, proposed))
    assert lengths == [8, 8, 1, 2, 4, 8]
    assert len(drafter.propose(tokens)) == 4


def test_proposals_equal_a_plain_search() -> None:
    rng = random.Random(4)
    for _ in range(300):
        tokens = [rng.randrange(4) for _ in range(rng.randint(2, 40))]
        drafter = NgramDrafter(5)
        history = tokens[: rng.randint(1, len(tokens))]
        drafter.propose(history)
        assert drafter.propose(tokens) == plainly(tokens, 5)


def plainly(tokens: list[int], count: int) -> list[int]:
    for matched in range(MOST_MATCH, LEAST_MATCH - 1, -1):
        tail = tokens[-matched:]
        for end in range(len(tokens) - 1, matched - 1, -1):
            if len(tail) == matched and tokens[end - matched : end] == tail:
                loop = tokens[end:]
                return [loop[index % len(loop)] for index in range(count)]
    return []


def test_a_search_is_linear_whatever_the_tokens() -> None:
    """The worst of several kinds of long texts, at the CPU: ten times as long is no 30 times."""
    seconds = []
    for length in (12_000, 120_000):
        rng = random.Random(1)
        texts = ([7] * length, [1, 2] * (length // 2), [rng.randrange(3) for _ in range(length)])
        worst = 0.0
        for text in texts:
            drafter = NgramDrafter(8)
            drafter.propose(text)
            times = []
            for _ in range(9):
                text.append(7)
                begun = time.thread_time()
                drafter.propose(text)
                times.append(time.thread_time() - begun)
            worst = max(worst, min(times))
        seconds.append(worst)
    assert seconds[1] < 30 * max(seconds[0], 1e-4)
