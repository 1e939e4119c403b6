"""What the demonstration model answers in one process, frame by frame."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from engine.backends.looped import LoopedBackend
from engine.backends.native import load_native
from engine.clock import MonotonicClock
from engine.protocol import (
    Done,
    DrawnToken,
    Failed,
    Frame,
    GenerateRequest,
    InputUsage,
    Started,
    TextDelta,
)
from engine.settings import Settings


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


@asynccontextmanager
async def engine(**settings: object) -> AsyncIterator[LoopedBackend]:
    """A native engine of these settings, with its thread and without HTTP."""
    fixed = {"secret": "x" * 16, "threads": 1, "log_level": "warning"}
    crashes: list[BaseException] = []
    whole = Settings.model_validate(fixed | settings)
    backend = LoopedBackend(whole, MonotonicClock(), load_native, crashes.append)
    await asyncio.to_thread(backend.load, lambda _stage, _fraction: None)
    try:
        yield backend
    finally:
        await backend.stop()
        assert not crashes


async def ask_all(backend: LoopedBackend, requests: Sequence[GenerateRequest]) -> list[Answered]:
    """All of them at once."""
    return list(await asyncio.gather(*(_ask(backend, request) for request in requests)))


async def _ask(backend: LoopedBackend, request: GenerateRequest) -> Answered:
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
                told = answered.choices.setdefault(frame.choice, Told())
                told.frames.append(TextDelta(frame.text, frame.choice))
                told.logprobs += frame.logprobs
            case Failed():
                raise AssertionError(frame.message)
            case _:
                answered.choices.setdefault(frame.choice, Told()).frames.append(frame)
    return answered
