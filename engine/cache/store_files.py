"""The store tier's records of files: which content a file has, and the work that is to be done."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from engine.cache.block import Block, Entry
from engine.cache.ids import BlockId, Digest

NameOf = Callable[[Digest], str]
Payload = bytes | memoryview
"""A block's content, in bytes."""


class BlockKey(NamedTuple):
    """The content that a file must have. `owner` is the digest of the scope's empty prefix.

    `packed` are the block's token ids. `place` is the block's index in its chain.
    """

    name: str
    owner: Digest
    digest: Digest
    parent: Digest
    place: int
    packed: bytes


class Save(NamedTuple):
    """A file to write, with the content of a device block."""

    key: BlockKey
    source: BlockId


class Load(NamedTuple):
    """A payload that was read, and the device block that it is copied to."""

    payload: bytes
    target: BlockId


class Note(NamedTuple):
    """A line for the journal: a whole entry (`put`), its times and lease (`touch`), or its end."""

    entry: Entry
    key: Digest
    kind: Literal["put", "touch", "end"]


@dataclass(slots=True, eq=False)
class SaveJob:
    """An entry on its way to the store: its blocks so far, each with a reference."""

    entry: Entry
    parent: Digest
    blocks: list[Block] = field(default_factory=list)
    num_pending: int = 0

    def next_key(self, name: str, owner: Digest, digest: Digest, packed: bytes) -> BlockKey:
        return BlockKey(name, owner, digest, self.parent, len(self.blocks), packed)


@dataclass(slots=True, eq=False)
class PendingFile:
    """A file that is being written. It has a reference on its block of its own."""

    block: Block
    digest: Digest
    jobs: list[SaveJob] = field(default_factory=list)
