"""Files on their way from the store: what is asked for, and what was read and waits to be copied.

A payload is kept by its file's name, which stands for its content, and never by its block.
"""

from collections.abc import Callable, Iterable
from itertools import islice

from engine.cache.block import Block
from engine.cache.store_files import BlockKey

MAX_READING = 64
"""Blocks that may be read or wait to be copied at one time."""


class StoreReads:
    def __init__(self, find: Callable[[Block], BlockKey | None]) -> None:
        """`find` gives what a block's file is of. None if it has none."""
        self._find = find
        self._reading: set[str] = set()
        self._loaded: dict[str, bytes] = {}
        self._asked: list[BlockKey] = []

    @property
    def is_reading(self) -> bool:
        return bool(self._reading)

    def ask(self, blocks: Iterable[Block], *, is_first: bool) -> None:
        """Ask for what a table waits for, in order. The first table that waits finds room."""
        keys = [self._find(block) for block in islice(blocks, MAX_READING)]
        if is_first:
            wanted = {key.name for key in keys if key is not None}
            self._loaded = {name: one for name, one in self._loaded.items() if name in wanted}
        for key in keys:
            if len(self._loaded) + len(self._reading) >= MAX_READING:
                return
            if key is not None and key.name not in self._reading and key.name not in self._loaded:
                self._reading.add(key.name)
                self._asked.append(key)

    def take_asked(self) -> list[BlockKey]:
        """The files to read now."""
        asked, self._asked = self._asked, []
        return asked

    def arrived(self, name: str, payload: bytes) -> None:
        """A file was read, and is what its key says."""
        if name in self._reading:
            self._reading.discard(name)
            self._loaded[name] = payload

    def take(self, block: Block) -> bytes | None:
        """A block's payload, if it is here."""
        key = self._find(block)
        return None if key is None else self._loaded.pop(key.name, None)

    def forget(self, name: str) -> None:
        """Nothing of this name is wanted any more."""
        self._reading.discard(name)
        self._loaded.pop(name, None)
