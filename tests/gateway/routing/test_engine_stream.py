"""An engine's stream may arrive in any pieces and may end anywhere."""

from collections.abc import AsyncIterator

import msgspec
import pytest

from engine.protocol import (
    Done,
    Finished,
    Frame,
    InputUsage,
    Receipt,
    Started,
    TextDelta,
    ToolInputDelta,
    ToolUseStart,
)
from gateway.base.errors import EngineFailed, EngineLost
from gateway.routing.client import EngineResponse
from gateway.routing.engine import Generation

pytestmark = pytest.mark.anyio
FRAMES: list[Frame] = [
    Started(
        request_id="r",
        epoch="e",
        usage=InputUsage(input_tokens=3, cache_read_tokens=5),
        breakpoints=[],
        receipt=Receipt(name_tokens=[], num_held=0),
    ),
    TextDelta("a\u2028\n🦉é"),
    ToolUseStart("c", "look"),
    ToolInputDelta('{"a": "\\n"}'),
    Finished(reason="tool_use", output_tokens=4),
    Done(request_id="r", output_tokens=4),
]


class Pieces(EngineResponse):
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


def lines(*frames: Frame) -> bytes:
    return b"".join(msgspec.json.encode(frame) + b"\n" for frame in frames)


RAW = b"\n" + lines(*FRAMES)


async def read(*pieces: bytes) -> list[list[Frame]]:
    return [frames async for frames in Generation(Pieces(*pieces), "r")]


def flat(batches: list[list[Frame]]) -> list[Frame]:
    return [frame for frames in batches for frame in frames]


async def test_cut_anywhere_it_is_the_same() -> None:
    for place in range(1, len(RAW)):
        assert flat(await read(RAW[:place], RAW[place:])) == FRAMES, place
    assert await read(*(bytes([byte]) for byte in RAW)) == [[], *([frame] for frame in FRAMES)]


async def test_what_came_together_is_passed_on_together() -> None:
    first = lines(*FRAMES[:3]) + lines(FRAMES[3])[:5]
    assert await read(b"\n", first, RAW[1 + len(first) :]) == [[], FRAMES[:3], FRAMES[3:]]


async def test_ended_anywhere_it_is_a_lost_engine_and_a_damaged_line_a_broken_protocol() -> None:
    for place in range(len(RAW) - 1):
        with pytest.raises(EngineLost):
            await read(RAW[:place])
    for damaged in (b"{}\n", b"\xff\n", b'{"type":"text"}\n', b"[" * 5000 + b"\n"):
        with pytest.raises(EngineFailed):
            await read(damaged, RAW)
