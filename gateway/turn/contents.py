"""Keeps the prompts and answers of workspaces that want it. Nothing is kept of any other.

It is written behind the answer, so no client waits for it. What is too much is not kept, and the
log says so.
"""

import asyncio
import zlib
from collections.abc import Iterable, Sequence

import msgspec

from engine.protocol import (
    Frame,
    Prompt,
    TextDelta,
    ThinkingDelta,
    ToolInputDelta,
    ToolUseStart,
)
from gateway.admin.structs.usage import AnswerPart, KeptContent
from gateway.base.background import Background, pause
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.base.logs import get_logger
from gateway.ledger.contents import Contents
from gateway.turn.state import Turn

MAX_BYTES = 8 << 20
MAX_WAITING_BYTES = 64 << 20
_FORGET_SECONDS = 60.0
_decoder = msgspec.json.Decoder(KeptContent)


class Keeper:
    def __init__(self, contents: Contents, background: Background, clock: Clock) -> None:
        self._contents = contents
        self._background = background
        self._clock = clock
        self._waiting_bytes = 0

    def keep(self, turn: Turn) -> None:
        """Keep what a turn was asked and what it answered so far. This never awaits."""
        frames = turn.whole
        num_bytes = turn.ask.plan.num_bytes + sum(map(_length, frames))
        if num_bytes > MAX_BYTES or self._waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            log = get_logger("contents")
            log.warning("content_not_kept", turn=turn.record.id, bytes=num_bytes)
            return
        self._waiting_bytes += num_bytes
        self._background.spawn(self._write(turn, frames, num_bytes), "keep contents")

    async def _write(self, turn: Turn, frames: Sequence[Frame], num_bytes: int) -> None:
        record, prompt = turn.record, turn.ask.plan.prompt
        at_ms = int(record.opened_at.timestamp() * 1000)

        def sealed() -> bytes:
            body = packed(prompt, parts_of(frames))
            return self._contents.sealed(record.workspace, record.id, body)

        try:
            body = await asyncio.to_thread(sealed)
            await self._contents.put(record.workspace, record.id, at_ms, body)
        except GatewayError as error:
            log = get_logger("contents")
            log.warning("content_not_kept", turn=record.id, error=str(error))
        finally:
            self._waiting_bytes -= num_bytes

    async def read(self, workspace: str, turn_id: str) -> tuple[KeptContent, int]:
        """What is kept of a turn, and until when (ms). Raise NotFound."""
        body, until_ms = await self._contents.get(workspace, turn_id, self._now_ms())

        def opened() -> KeptContent:
            return unpacked(self._contents.opened(workspace, turn_id, body))

        return await asyncio.to_thread(opened), until_ms

    async def remove(self, turn_id: str) -> None:
        await self._contents.remove(turn_id)

    async def forget(self) -> None:
        """Delete what is kept no longer."""
        await self._contents.forget(self._now_ms())

    async def run(self, stopping: asyncio.Event) -> None:
        while not stopping.is_set():
            try:
                await self.forget()
            except GatewayError as error:
                get_logger("contents").warning("contents_not_deleted", error=str(error))
            await pause(stopping, _FORGET_SECONDS)

    def _now_ms(self) -> int:
        return int(self._clock.wall().timestamp() * 1000)


def _length(frame: Frame) -> int:
    match frame:
        case TextDelta() | ThinkingDelta():
            return len(frame.text)
        case ToolInputDelta():
            return len(frame.partial_json)
    return 0


def parts_of(frames: Iterable[Frame]) -> list[AnswerPart]:
    """An answer's texts, thoughts and calls, each choice's in its order."""
    parts: list[tuple[AnswerPart, list[str]]] = []
    latest: dict[int, int] = {}

    def add(choice: int, kind: str, text: str, name: str | None = None) -> None:
        index = latest.get(choice)
        if index is None or parts[index][0].kind != kind or name is not None:
            index = latest[choice] = len(parts)
            parts.append((AnswerPart(choice=choice, kind=kind, text="", name=name), []))
        parts[index][1].append(text)

    for frame in frames:
        match frame:
            case TextDelta():
                add(frame.choice, "text", frame.text)
            case ThinkingDelta():
                add(frame.choice, "thinking", frame.text)
            case ToolUseStart():
                add(frame.choice, "call", "", frame.name)
            case ToolInputDelta():
                add(frame.choice, "call", frame.partial_json)
    for part, texts in parts:
        part.text = "".join(texts)  # once: to add to a text piece by piece is quadratic
    return [part for part, _ in parts]


def packed(prompt: Prompt, answer: list[AnswerPart]) -> bytes:
    return zlib.compress(msgspec.json.encode(KeptContent(prompt=prompt, answer=answer)), 1)


def unpacked(body: bytes) -> KeptContent:
    return _decoder.decode(zlib.decompress(body))
