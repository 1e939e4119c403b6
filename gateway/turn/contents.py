"""Keeps prompts and answers, and the responses that clients continue.

Prompts and answers are kept only for workspaces that want it. They are sealed, and are written to
the journal in the commit of the turn's close. So they outlive a kill and an outage of the database.
A drain of their own moves them to the database, some megabytes at a time. A content that is too
large is not kept. The turn's row and the log say so.

A response is kept before its last event goes out, because the next request may name it. It is kept
with its own input and the ids of the responses before it. So each response is deleted by itself,
and a long conversation costs no more than its length.
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
"""The most bytes that wait for the database: at most a quarter of the journal."""
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
    # A content that would exceed this bound is not kept.
    most_waiting_bytes: int = MAX_WAITING_BYTES
    # The bytes of contents that are being sealed or are in the journal.
    waiting_bytes: int = 0
    # Held while contents move or are deleted: a deleted one must not come back from the journal.
    _moving: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def start(self) -> None:
        """Count what an earlier run left in the journal."""
        self.waiting_bytes = await self.journal.content_bytes()

    async def sealed(self, turn: Turn) -> Content | None:
        """The turn's prompt and its answer so far, sealed in a thread. None where they are too
        large; the turn's record then says so."""
        record = turn.record
        num_bytes = _size_of(turn)
        if num_bytes > MAX_BYTES:
            record.content = TOO_LARGE
        elif self.waiting_bytes + num_bytes > self.most_waiting_bytes:
            record.content = NO_ROOM
        else:
            return await self._seal(turn, num_bytes)
        log = get_logger("contents")
        log.warning("content_not_kept", turn=record.id, bytes=num_bytes, reason=record.content)
        return None

    async def _seal(self, turn: Turn, num_bytes: int) -> Content:
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
        """Keep the answer of a turn that was cut off. This never awaits: a task writes it. Until
        the journal has it, the record says that nothing is kept."""
        record = turn.record

        async def write() -> None:
            content = await self.sealed(turn)
            if content is None:
                return
            try:
                await self.journal.keep(content)
                record.content = KEPT
            except GatewayError as error:  # the journal goes on trying
                log = get_logger("contents")
                log.warning("content_waits", turn=record.id, error=str(error))

        self.background.spawn(write(), "keep contents")

    async def drain(self, stopping: asyncio.Event) -> None:
        """Move contents from the journal to the database until `stopping` is set. Then move the
        rest, if the database takes it."""
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
        """Move the oldest contents, about _STEP_BYTES; return how many."""
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
        """The kept content of a turn, and until when it is kept (ms). Raise NotFound."""
        body, until_ms = await self.contents.get(workspace, turn_id, self.clock.wall_ms())

        def unseal() -> KeptContent:
            return _decoder.decode(zlib.decompress(self.contents.opened(workspace, turn_id, body)))

        return await asyncio.to_thread(unseal), until_ms

    async def remove(self, turn_id: str) -> None:
        """Delete a turn's content from the database and from this gateway's journal."""
        async with self._moving:
            await self._forget([turn_id])
            await self.contents.remove([turn_id])

    async def purge(self, workspace: str) -> int:
        """Delete a workspace's contents from this gateway's journal; return of how many turns."""
        async with self._moving:
            num_turns, num_bytes = await self.journal.purge_contents(workspace)
            self.waiting_bytes -= num_bytes
            await self.journal.empty_log()
        return num_turns

    async def forget(self) -> None:
        """Delete contents whose time is over."""
        await self.contents.forget(self.clock.wall_ms())

    async def run(self, stopping: asyncio.Event) -> None:
        await repeat(stopping, _FORGET_SECONDS, self.forget, "contents_not_deleted")


class Link(msgspec.Struct, frozen=True, array_like=True):
    """One response of a chain."""

    id: str
    # How many bytes are kept of it.
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
    # Whether responses of workspaces that keep no contents are kept too.
    keeps_all: bool
    # The most bytes that are kept of one workspace.
    most_bytes: int
    # The bytes that are kept of each workspace.
    num_bytes: Counter[str] = field(default_factory=Counter)
    # When the database was last asked for a workspace's bytes, on the monotonic clock.
    asked_at: dict[str, float] = field(default_factory=dict)

    def keeps(self, principal: Principal) -> bool:
        return self.keeps_all or principal.keeps_contents

    async def check_room(self, workspace: str) -> None:
        """Raise RateLimited where a workspace has no room for another response.

        What other gateways keep, and what is deleted, is known after some seconds. While the
        database is away no response is kept, and each answer says so.
        """
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
        """The kept responses of these ids, by id."""
        bodies = await self.contents.find(workspace, ids, self.clock.wall_ms()) if ids else {}

        def unseal() -> dict[str, StoredResponse]:
            stored = dict[str, StoredResponse]()
            for kept_id, (body, _) in bodies.items():
                packed = self.contents.opened(workspace, kept_id, body)
                stored[kept_id] = _stored.decode(zlib.decompress(packed))
            return stored

        return await asyncio.to_thread(unseal) if bodies else {}

    async def put(
        self, workspace: str, kept_id: str, make: Callable[[], StoredResponse]
    ) -> Link | None:
        """Make a response in a thread and keep it. Return None, and log it, where it is too large
        or can't be written."""

        def seal() -> tuple[bytes | None, int]:
            body = _encode(make())
            if len(body) > MAX_BYTES:
                return None, len(body)
            packed = zlib.compress(body, 1)
            return self.contents.sealed(workspace, kept_id, packed), len(body)

        try:
            sealed_body, num_bytes = await asyncio.to_thread(seal)
            if sealed_body is not None:
                await self.contents.put(workspace, kept_id, self.clock.wall_ms(), sealed_body)
                self.num_bytes[workspace] += len(sealed_body)
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
        """Change a kept response in a thread. With `renews` its time begins anew."""

        def reseal(body: bytes) -> bytes:
            kept = _stored.decode(zlib.decompress(self.contents.opened(workspace, kept_id, body)))
            edit(kept)
            return self.contents.sealed(workspace, kept_id, zlib.compress(_encode(kept), 1))

        now_ms = self.clock.wall_ms() if renews else None
        await self.contents.change(workspace, kept_id, now_ms, reseal)

    async def remove(self, ids: Collection[str]) -> None:
        await self.contents.remove(ids)

    def forget_sizes(self, workspace: str) -> None:
        """Forget a workspace's bytes: rows of it were deleted, and the database is asked anew."""
        self.num_bytes.pop(workspace, None)
        self.asked_at.pop(workspace, None)

    async def run(self, stopping: asyncio.Event) -> None:
        """Delete responses whose time is over."""

        async def forget() -> None:
            await self.contents.forget(self.clock.wall_ms())

        await repeat(stopping, _FORGET_SECONDS, forget, "contents_not_deleted")


def check_chain(number: int, num_bytes: int, path: str) -> None:
    """Raise InvalidRequest for a chain that is too long to be continued."""
    if number > MAX_CHAIN or num_bytes > MAX_CHAIN_BYTES:
        raise InvalidRequest(
            f"{path}: continues {number} responses of {num_bytes} bytes, and the bounds are"
            f" {MAX_CHAIN} responses and {MAX_CHAIN_BYTES} bytes",
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
    """An answer's texts, thoughts and calls, in order within each choice."""
    # Each part, and the pieces of its text.
    parts: list[tuple[AnswerPart, list[str]]] = []
    # The index of each choice's latest part.
    latest: dict[int, int] = {}

    def add(choice: int, kind: str, text: str, name: str | None = None) -> None:
        index = latest.get(choice)
        if index is None or parts[index][0].kind != kind or name is not None:
            index = len(parts)
            latest[choice] = index
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
