"""The adapters that requests may ask for: which are on the model, and how they come and go.

A name is the operator's word for a folder's content at one time. Requests, the chain of digests and
the model go by the weights' digest, so what one adapter wrote is never read by another, whatever
either is called. Names are the event loop's. What is on the model is the engine's thread's.
"""

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol, TypeVar

import msgspec
import structlog

from engine.cache.digests import ChainKind, last_place
from engine.cache.ids import TokenId
from engine.errors import AdapterRefused, NotFound
from engine.peft import WEIGHTS
from engine.protocol.reports import AdapterInfo, Description
from engine.refusal import StartRefused
from engine.schedule.accounting import Accounting

MAX_ADAPTERS = 64
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_LOOK_SECONDS = 0.1
"""The time between two looks at whether a request still uses an adapter that is to go."""

READ_SECONDS = 50.0
"""The most time for reading one adapter. A gateway waits for a minute."""

T = TypeVar("T")
Call = Callable[[Callable[[], T]], Awaitable[T]]
"""Runs a function on the engine's thread, between two steps."""
log = structlog.get_logger()


class ReadAdapter(Protocol):
    """An adapter that was read and checked."""

    @property
    def digest(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def num_bytes(self) -> int: ...
    @property
    def invocation(self) -> Sequence[TokenId]: ...


class ModelAdapters(Protocol):
    """The adapters on a model. All methods but `read` are called on the engine's thread."""

    def read(self, directory: Path) -> ReadAdapter:
        """Read and check an adapter. `attach` then puts it on the model, by its digest.

        Raise StartRefused with the reason.
        """
        ...

    def attach(self, digest: str) -> None: ...
    def detach(self, digest: str) -> None: ...


_Read = tuple[AdapterInfo, ReadAdapter, int]
"""What is told of an adapter, the adapter, and the bytes of the file with its weights."""


def _late(parts: "AdapterParts", name: str) -> AdapterRefused:
    return AdapterRefused(f"{name[:64]}: not read in {parts.read_seconds:g} seconds")


@dataclass(frozen=True, slots=True)
class AdapterParts:
    """What a backend that computes adapters has."""

    # Its folders are adapters, by their names.
    directory: Path | None
    model: ModelAdapters
    # Gives the text of an invocation.
    spelled: Callable[[Sequence[TokenId]], str]
    # The most bytes of all loaded weights' files together.
    max_bytes: int
    # Folders of adapters with other names.
    named: Mapping[str, Path] = field(default_factory=dict)
    # An adapter that takes longer to read is refused.
    read_seconds: float = READ_SECONDS

    def names(self) -> list[str]:
        folders = [] if self.directory is None else sorted(self.directory.iterdir())
        return list(
            dict.fromkeys([*self.named, *(folder.name for folder in folders if folder.is_dir())])
        )

    def find(self, name: str) -> Path | None:
        path = self.named.get(name) or (self.directory and self.directory / name)
        return path if path is not None and path.is_dir() else None


class AdapterShelf:
    """The adapters of one engine, by name.

    `parts` None: the engine has no adapters. All adapters of the directory are read when the shelf
    is made.
    """

    def __init__(self, parts: AdapterParts | None = None) -> None:
        self._parts = parts
        self._by_name: dict[str, tuple[AdapterInfo, ReadAdapter]] = {}
        self._leaving: dict[str, AdapterInfo] = {}
        self._attached_bytes: dict[str, int] = {}
        self._changing = asyncio.Lock()
        self._reading: Future[_Read] | None = None
        self._ends: set[asyncio.Task[None]] = set()
        if parts is None:
            return
        names = parts.names()
        for name in names[:MAX_ADAPTERS]:
            try:
                future = self._start_reading(parts, name)
                try:
                    info, read, size = future.result(parts.read_seconds)
                except TimeoutError:
                    raise _late(parts, name) from None
            except AdapterRefused as error:
                log.error("an adapter is not loaded", why=str(error))
                continue
            self._attach(parts, read.digest, size)
            self._by_name[name] = info, read
        for name in names[MAX_ADAPTERS:]:
            log.error("an adapter is not loaded", why=f"{name}: there are {MAX_ADAPTERS} already")

    def told(self, description: Description) -> Description:
        """The description with the adapters as they are now."""
        infos = [info for info, _ in self._by_name.values()] + list(self._leaving.values())
        return msgspec.structs.replace(description, adapters=infos) if infos else description

    def acting(self, digest: str, tokens: Sequence[TokenId]) -> ChainKind | None:
        """How an adapter acts on a prompt; None if it does not. Raise NotFound."""
        if not digest:
            return None
        for _, read in list(self._by_name.values()):
            if read.digest == digest:
                start = last_place(tokens, read.invocation) if read.invocation else 0
                return None if start is None else ChainKind(digest, start)
        raise NotFound("adapter: not on this engine")

    def check_attached(self, adapter: ChainKind | None) -> None:
        """Raise NotFound if the adapter has left the model.

        It is called on the engine's thread, before a request is taken in.
        """
        if adapter is not None and adapter.digest not in self._attached_bytes:
            raise NotFound("adapter: not on this engine")

    async def load(self, name: str, call: Call[None], accounting: Accounting) -> AdapterInfo:
        """Read a folder and put its adapter on the model. It replaces an adapter of the same name.

        Raise AdapterRefused, which says why.
        """
        parts = self._parts
        if parts is None:
            raise AdapterRefused(f"{name[:64]}: this engine takes no adapters")
        async with self._changing:
            if name not in self._by_name and len(self._by_name) >= MAX_ADAPTERS:
                raise AdapterRefused(f"{name[:64]}: there are {MAX_ADAPTERS} already")
            future = self._start_reading(parts, name)
            try:
                async with asyncio.timeout(parts.read_seconds):
                    # A late reading goes on, since nothing ends a thread. Its result is not used.
                    info, read, size = await asyncio.shield(asyncio.wrap_future(future))
            except TimeoutError:
                raise _late(parts, name) from None
            await call(partial(self._attach, parts, read.digest, size))
            before = self._by_name.get(name)
            self._by_name[name] = info, read
        log.info("adapter loaded", adapter=name, digest=info.digest)
        if before is not None:
            self._leave(parts, before[0], call, accounting)
        return info

    def unload(self, name: str, call: Call[None], accounting: Accounting) -> AdapterInfo:
        """Take no more requests for an adapter. After its last request it goes with its entries.

        Raise AdapterRefused.
        """
        if self._parts is None or name not in self._by_name:
            raise AdapterRefused(f"{name[:64]}: not on this engine")
        info, _ = self._by_name.pop(name)
        log.info("adapter unloaded", adapter=name, digest=info.digest)
        return self._leave(self._parts, info, call, accounting)

    async def stop(self) -> None:
        for task in self._ends:
            task.cancel()
        for task in list(self._ends):
            with suppress(asyncio.CancelledError):
                await task

    # Inside.

    def _start_reading(self, parts: AdapterParts, name: str) -> "Future[_Read]":
        """Read on a thread that the process's end does not wait for.

        Raise AdapterRefused while an earlier thread still reads, so that a dead disk takes one
        thread only.
        """
        if self._reading is not None and not self._reading.done():
            raise AdapterRefused(f"{name[:64]}: an earlier one is still being read")
        reading = Future[_Read]()

        def read() -> None:
            try:
                reading.set_result(self._read(parts, name))
            except AdapterRefused as error:
                reading.set_exception(error)
            finally:
                if not reading.done():  # a fault of ours: the thread's end tells it
                    reading.set_exception(AdapterRefused(f"{name[:64]}: could not be read"))

        self._reading = reading
        threading.Thread(target=read, name="adapter", daemon=True).start()
        return reading

    def _read(self, parts: AdapterParts, name: str) -> "_Read":
        """The adapter, and the bytes of the file with its weights. Raise AdapterRefused."""
        if not _NAME.fullmatch(name):
            raise AdapterRefused("name: 64 letters, digits, `.`, `_` or `-` at most")
        path = parts.find(name)
        if path is None:
            raise AdapterRefused(f"{name}: ENGINE_ADAPTERS has no such folder")
        size = 0
        attached_bytes = sum(self._attached_bytes.values())
        with suppress(OSError):  # `read` tells that a file is missing
            size = (path / WEIGHTS).stat().st_size
        if size > parts.max_bytes - attached_bytes:
            raise AdapterRefused(
                f"{name}: {WEIGHTS} has {size} bytes, the loaded ones have {attached_bytes}, and "
                f"ENGINE_ADAPTER_BYTES lets all have {parts.max_bytes}"
            )
        try:
            read = parts.model.read(path)
        except StartRefused as error:
            raise AdapterRefused(f"{name}: {error}") from error
        info = AdapterInfo(
            name=name,
            digest=read.digest,
            rank=read.rank,
            num_bytes=read.num_bytes,
            invocation=parts.spelled(read.invocation) if read.invocation else None,
        )
        return info, read, size

    def _attach(self, parts: AdapterParts, digest: str, size: int) -> None:
        parts.model.attach(digest)
        self._attached_bytes[digest] = size

    def _leave(
        self, parts: AdapterParts, info: AdapterInfo, call: Call[None], accounting: Accounting
    ) -> AdapterInfo:
        digest = info.digest
        if self._is_named(digest):
            return info
        info = self._leaving[digest] = msgspec.structs.replace(info, is_leaving=True)

        def try_to_end() -> None:
            if digest in self._attached_bytes and accounting.drop_adapter(digest):
                parts.model.detach(digest)
                self._attached_bytes.pop(digest, None)

        async def end() -> None:
            """Wait for the adapter's requests. Then end its entries."""
            while True:
                async with self._changing:
                    # It may have come back, under this name or another.
                    if not self._is_named(digest):
                        await call(try_to_end)
                    if self._is_named(digest) or digest not in self._attached_bytes:
                        self._leaving.pop(digest, None)
                        return
                await asyncio.sleep(_LOOK_SECONDS)

        task = asyncio.create_task(end())
        self._ends.add(task)
        task.add_done_callback(self._ends.discard)
        return info

    def _is_named(self, digest: str) -> bool:
        return any(info.digest == digest for info, _ in self._by_name.values())
