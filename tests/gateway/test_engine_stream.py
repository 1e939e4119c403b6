"""An engine's stream may arrive in any pieces and may end anywhere."""

from collections.abc import AsyncIterator

import httpx
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
from gateway.engines import Generation
from gateway.errors import EngineFailed, EngineLost

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
RAW = b"\n" + b"\n".join(msgspec.json.encode(frame) for frame in FRAMES) + b"\n"


class Pieces(httpx.AsyncByteStream):
    def __init__(self, *pieces: bytes) -> None:
        self._pieces = pieces

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for piece in self._pieces:
            yield piece


async def read(*pieces: bytes) -> list[Frame | None]:
    generation = Generation(httpx.Response(200, stream=Pieces(*pieces)), "r")
    return [frame async for frame in generation.frames()]


@pytest.mark.anyio
async def test_cut_anywhere_it_is_the_same() -> None:
    for place in range(1, len(RAW)):
        assert await read(RAW[:place], RAW[place:]) == [None, *FRAMES], place
    assert await read(*(bytes([byte]) for byte in RAW)) == [None, *FRAMES]


@pytest.mark.anyio
async def test_ended_anywhere_before_its_end_it_is_a_lost_engine() -> None:
    for place in range(len(RAW) - 1):
        with pytest.raises(EngineLost):
            await read(RAW[:place])


@pytest.mark.anyio
async def test_what_is_late_double_or_anothers_is_ignored_and_counted() -> None:
    started, *_, done = FRAMES
    assert isinstance(started, Started) and isinstance(done, Done)
    strange: list[Frame] = [
        msgspec.structs.replace(started, request_id="another"),
        started,
        msgspec.structs.replace(done, request_id="another"),
    ]
    for frame in strange:
        frames = [*FRAMES[:2], frame, *FRAMES[2:], done, TextDelta("late")]
        raw = b"\n".join(msgspec.json.encode(frame) for frame in frames) + b"\n"
        generation = Generation(httpx.Response(200, stream=Pieces(raw)), "r")
        assert [found async for found in generation.frames()] == FRAMES
        assert generation.num_ignored == 3


@pytest.mark.anyio
async def test_a_damaged_line_is_a_broken_protocol() -> None:
    for damaged in (b"{}\n", b"\xff\n", b'{"type":"text"}\n', b"[" * 5000 + b"\n"):
        with pytest.raises(EngineFailed):
            await read(damaged, RAW)
