"""Keeps the prompts and answers of workspaces that want it, and the responses that clients go on
with. Nothing is kept of any other.

Prompts and answers are sealed, and written to the journal in the commit of the turn's close. So
both outlive a kill and a database that is away. A drain of their own moves them to the database,
some megabytes at a time. What is too much is not kept, which the turn's row and the log say.

A response is kept before its last event goes out: the next request may name it. It is kept with its
own input alone, and the ids of those before it: so each is deleted, or forgotten, by itself, and a
long conversation costs no more than its length.
"""

import asyncio
import zlib
from collections import Counter
from collections.abc import Callable, Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf

import msgspec
from msgspec import Raw

from engine.protocol import Frame, TextDelta, ThinkingDelta, ToolInputDelta, ToolUseStart
from gateway.base.background import Background, pause, repeat
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError, InvalidRequest, RateLimited
from gateway.base.logs import get_logger
from gateway.journal.contents import Content
from gateway.journal.store import Journal
from gateway.ledger.contents import Contents
from gateway.prompt.ask import Principal
from gateway.structs.usage import (
    KEPT,
    NO_ROOM,
    TOO_LARGE,
    AnswerPart,
    KeptContent,
)
from gateway.turn.state import Turn

MAX_BYTES = 8 << 20
MAX_WAITING_BYTES = 64 << 20
"""The most that waits for the database. It is a quarter of the journal at most."""
_STEP_BYTES = 4 << 20
_DRAIN_SECONDS = 0.25
_RETRY_SECONDS = 1.0
_FORGET_SECONDS = 60.0
_decoder = msgspec.json.Decoder(KeptContent)
MAX_CHAIN = 1000
MAX_CHAIN_BYTES = 32 << 20


@dataclass(slots=True)
class ContentWriter:
    """Writes prompts and answers of turns. A turn's record says what became of its content
    (`KEPT_CONTENTS`)."""

    contents: Contents
    journal: Journal
    background: Background
    clock: Clock
    # What would go beyond it is not kept.
    most_waiting_bytes: int = MAX_WAITING_BYTES
    # Of contents that the database does not have yet: being sealed, or in the journal.
    waiting_bytes: int = 0
    # What is deleted must not come back from the journal.
    _moving: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        """Count what an earlier run left in the journal."""
        self.waiting_bytes = await self.journal.content_bytes()

    async def sealed(self, turn: Turn) -> Content | None:
        """What a turn was asked and what it answered so far, sealed off the loop. None where it is
        too much, which the turn's record says."""
        record = turn.record
        num_bytes = _size_of(turn)
        if num_bytes > MAX_BYTES:
            record.content = TOO_LARGE
        elif self.waiting_bytes + num_bytes > self.most_waiting_bytes:
            record.content = NO_ROOM
        else:
            return await self._sealed(turn, num_bytes)
        log = get_logger("contents")
        log.warning("content_not_kept", turn=record.id, bytes=num_bytes, reason=record.content)
        return None

    async def _sealed(self, turn: Turn, num_bytes: int) -> Content:
        record = turn.record
        frames = list(turn.whole)

        def seal() -> bytes:
            kept = KeptContent(prompt=turn.ask.plan.prompt, answer=parts_of(frames))
            packed = zlib.compress(msgspec.json.encode(kept), 1)
            return self.contents.sealed(record.workspace, record.id, packed)

        self.waiting_bytes += num_bytes
        try:
            body = await asyncio.to_thread(seal)
            self.waiting_bytes += len(body)
        finally:
            self.waiting_bytes -= num_bytes
        at_ms = int(record.opened_at.timestamp() * 1000)
        return Content(record.id, record.workspace, at_ms, body)

    def write(self, turn: Turn) -> None:
        """Write what a turn that was cut off answered. This never awaits. The record says that it
        is not kept, until it is in the journal."""
        record = turn.record

        async def write() -> None:
            content = await self.sealed(turn)
            if content is None:
                return
            try:
                await self.journal.keep(content)
                record.content = KEPT
            except GatewayError as error:  # the journal tries on
                log = get_logger("contents")
                log.warning("content_waits", turn=record.id, error=str(error))

        self.background.spawn(write(), "keep contents")

    async def drain(self, stopping: asyncio.Event) -> None:
        """Move contents from the journal to the database. What is there at a clean stop is moved
        too, if the database takes it."""
        while not stopping.is_set():
            try:
                moved = await self.step() if self.waiting_bytes else 0
                rest = 0.0 if moved else _DRAIN_SECONDS
            except GatewayError as error:
                get_logger("contents").warning("contents_wait", error=str(error))
                rest = _RETRY_SECONDS
            await pause(stopping, rest)
        with suppress(GatewayError):
            while await self.step():
                pass

    async def step(self) -> int:
        """Move some, the oldest first; return how many."""
        async with self._moving:
            oldest = await self.journal.oldest_contents(_STEP_BYTES)
            for content in oldest:
                await self.contents.put(content.workspace, content.id, content.at_ms, content.body)
            if oldest:
                await self._forget([content.id for content in oldest])
        return len(oldest)

    async def _forget(self, turn_ids: list[str]) -> None:
        num_bytes = await self.journal.forget_contents(turn_ids)
        # In a statement of its own: `-= await` would undo what others added meanwhile.
        self.waiting_bytes -= num_bytes

    async def read(self, workspace: str, turn_id: str) -> tuple[KeptContent, int]:
        """What is kept of a turn, and until when (ms). Raise NotFound."""
        body, until_ms = await self.contents.get(workspace, turn_id, self.clock.wall_ms())

        def opened() -> KeptContent:
            return _decoder.decode(zlib.decompress(self.contents.opened(workspace, turn_id, body)))

        return await asyncio.to_thread(opened), until_ms

    async def remove(self, turn_id: str) -> None:
        """Delete what is kept of a turn, here and in this gateway's journal."""
        async with self._moving:
            await self._forget([turn_id])
            await self.contents.remove([turn_id])

    async def purge(self, workspace: str) -> int:
        """Delete what this gateway's journal has of a workspace; return of how many turns."""
        async with self._moving:
            number, num_bytes = await self.journal.purge_contents(workspace)
            self.waiting_bytes -= num_bytes
            await self.journal.empty_log()
        return number

    async def forget(self) -> None:
        """Delete what is kept no longer."""
        await self.contents.forget(self.clock.wall_ms())

    async def run(self, stopping: asyncio.Event) -> None:
        await repeat(stopping, _FORGET_SECONDS, self.forget, "contents_not_deleted")


class Link(msgspec.Struct, frozen=True, array_like=True):
    """One response of a chain, and the bytes of what is kept of it."""

    id: str
    num_bytes: int


class StoredResponse(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A response with its own input, or a conversation."""

    # The input's items.
    items: list[Raw] = []
    response: Raw = Raw(b"null")
    output: list[Raw] = []
    # The responses before it, or in it, the oldest first.
    chain: list[Link] = []
    metadata: dict[str, str] = {}
    created_at: int = 0


_FULL_SECONDS = 2.0
_stored = msgspec.json.Decoder(StoredResponse)
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class StoredResponses:
    """Responses and conversations of OpenAI's API, and Google's interactions, by id."""

    contents: Contents
    clock: Clock
    # Also those of workspaces that set no days.
    keeps_all: bool
    # Of each response.
    most_bytes: int
    # The bytes that are kept of a workspace, and when the database was asked for them.
    num_bytes: Counter[str] = field(default_factory=Counter)
    asked_at: dict[str, float] = field(default_factory=dict)

    def keeps(self, principal: Principal) -> bool:
        return self.keeps_all or principal.keeps_contents

    async def check_room(self, workspace: str) -> None:
        """Raise RateLimited where as much of a workspace is kept as may be. What other gateways
        keep, and what is deleted, is known after a while. Where the database can't be asked nothing
        is kept either, which the answer tells."""
        sizes = self.num_bytes
        now = self.clock.monotonic()
        is_full = sizes[workspace] >= self.most_bytes
        seconds = _FULL_SECONDS if is_full else _FORGET_SECONDS
        if now - self.asked_at.get(workspace, -inf) >= seconds:
            self.asked_at[workspace] = now
            with suppress(GatewayError):
                sizes[workspace] = await self.contents.num_bytes(workspace)
        if sizes[workspace] >= self.most_bytes:
            what = "bytes of kept responses; delete some, or say `store: false`"
            raise RateLimited(what, self.most_bytes)

    async def find(self, workspace: str, ids: Collection[str]) -> dict[str, StoredResponse]:
        """Those of these that are kept."""
        bodies = await self.contents.find(workspace, ids, self.clock.wall_ms()) if ids else {}

        def opened() -> dict[str, StoredResponse]:
            return {
                kept_id: _stored.decode(
                    zlib.decompress(self.contents.opened(workspace, kept_id, body))
                )
                for kept_id, (body, _) in bodies.items()
            }

        return await asyncio.to_thread(opened) if bodies else {}

    async def put(
        self, workspace: str, kept_id: str, make: Callable[[], StoredResponse]
    ) -> Link | None:
        """Keep what is made, off the loop; None, with a line in the log, where it is too much or
        can't be written."""

        def sealed() -> tuple[bytes | None, int]:
            body = _encode(make())
            packed = zlib.compress(body, 1) if len(body) <= MAX_BYTES else None
            whole = None if packed is None else self.contents.sealed(workspace, kept_id, packed)
            return whole, len(body)

        try:
            body, num_bytes = await asyncio.to_thread(sealed)
            if body is not None:
                await self.contents.put(workspace, kept_id, self.clock.wall_ms(), body)
                self.num_bytes[workspace] += len(body)
                return Link(kept_id, num_bytes)
            error = f"longer than {MAX_BYTES} bytes"
        except GatewayError as failure:
            error = str(failure)
        get_logger("contents").warning("response_not_kept", id=kept_id, error=error)
        return None

    async def change(
        self,
        workspace: str,
        kept_id: str,
        edit: Callable[[StoredResponse], None],
        *,
        renews: bool = True,
    ) -> None:
        """Change what is kept, off the loop. Its time begins anew where that `renews` it."""

        def changed(body: bytes) -> bytes:
            kept = _stored.decode(zlib.decompress(self.contents.opened(workspace, kept_id, body)))
            edit(kept)
            return self.contents.sealed(workspace, kept_id, zlib.compress(_encode(kept), 1))

        now_ms = self.clock.wall_ms() if renews else None
        await self.contents.change(workspace, kept_id, now_ms, changed)

    async def remove(self, ids: Collection[str]) -> None:
        await self.contents.remove(ids)

    def forget_sizes(self, workspace: str) -> None:
        """The database has other rows of the workspace from now on."""
        self.num_bytes.pop(workspace, None)
        self.asked_at.pop(workspace, None)

    async def run(self, stopping: asyncio.Event) -> None:
        """Delete what is kept no longer."""

        async def forget() -> None:
            await self.contents.forget(self.clock.wall_ms())

        await repeat(stopping, _FORGET_SECONDS, forget, "contents_not_deleted")


def check_chain(number: int, num_bytes: int, path: str) -> None:
    """Raise InvalidRequest for so many responses, of so many bytes, that none can go on with."""
    if number > MAX_CHAIN or num_bytes > MAX_CHAIN_BYTES:
        raise InvalidRequest(
            f"{path}: has {number} responses before, of {num_bytes} bytes; the most are"
            f" {MAX_CHAIN}, of {MAX_CHAIN_BYTES} bytes",
            path,
        )


def _size_of(turn: Turn) -> int:
    """The bytes of a turn's prompt and of what it answered so far."""
    plan = turn.ask.plan
    num_bytes = plan.num_bytes + sum(len(image.data) for image in plan.prompt.images)
    for frame in turn.whole:
        match frame:
            case TextDelta() | ThinkingDelta():
                num_bytes += len(frame.text)
            case ToolInputDelta():
                num_bytes += len(frame.partial_json)
    return num_bytes


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
