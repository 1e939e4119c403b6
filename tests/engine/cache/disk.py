"""The world's disk: what the threads of a real store do, in order, with every file known.

Changes wait in a line until `work` makes them, as they do behind a thread. A killed process loses
those that wait. `journal` is what the journal's file would tell.
"""

from collections import deque
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from engine.cache.block import Block, Entry
from engine.cache.ids import Digest
from engine.cache.store_tier import BlockKey
from tests.engine.cache.lives import Expected, Life, Prefix, note_new_leases

if TYPE_CHECKING:
    from tests.engine.cache.world import World


class Told(NamedTuple):
    """An entry as the journal has it, and its files."""

    entry: Entry
    names: tuple[str, ...]


@dataclass
class FakeDisk:
    files: dict[str, tuple[BlockKey, list[int]]] = field(default_factory=dict)
    journal: dict[Digest, Told] = field(default_factory=dict)
    line: deque[tuple[str, object]] = field(default_factory=deque)
    damaged: set[str] = field(default_factory=set)
    """Files that are there, and are not what they must be."""
    torn: set[str] = field(default_factory=set)
    """Those of them whose damage a look at the header shows, as at a start."""


def save(world: "World", max_blocks: int = 100) -> None:
    """What the engine's thread does after a step."""
    assert world.store is not None
    world.entries.leases.take_ended()
    saves = world.store.take_saves(max_blocks)
    _note_displaced(world)
    assert len(saves) <= max_blocks
    queue_notes(world)
    for save in saves:
        source = world.pool.blocks[save.source]
        assert bytes(source.tokens).startswith(save.key.packed)
        world.disk.line.append(("write", (save.key, list(world.memory[save.source]))))


def _note_displaced(world: "World") -> None:
    """Leases that held blocks of the store alone, and made way there for another scope's copy."""
    for ended in world.entries.leases.take_ended():
        assert ended.reason == "yielded" and ended.entry.lease_tier == "disk"
        world.expected[world.meaning[ended.entry.key]].is_promised = False
    note_new_leases(world)


def queue_notes(world: "World") -> None:
    assert world.store is not None
    for note in world.store.take_notes():
        world.disk.line.append(("note", _told(world, note.entry, note.kind)))
    world.disk.line.extend(("delete", name) for name in world.store.take_deletes())


def _told(world: "World", entry: Entry, kind: str) -> Told | Digest:
    if kind == "end" or entry.stored is None:
        return entry.key
    assert world.store is not None
    end = entry.expires_at
    line = Entry(
        scope=entry.scope,
        key=entry.key,
        tokens=entry.tokens,
        ttl=entry.ttl,
        blocks=[],
        ready_at=entry.ready_at,
        expires_at=end,
        kept_until=end,
        used_at=entry.used_at,
        is_leased=entry.is_leased,
        is_asked_for=entry.is_asked_for,
        kind=entry.kind,
    )
    return Told(line, tuple(world.store.key_of(block).name for block in entry.stored))


def work(world: "World", count: int = 10_000, *, is_good: bool = True) -> None:
    """The writer's thread gets so far. Where it is not good, no file can be written."""
    disk = world.disk
    assert world.store is not None
    world.entries.leases.take_ended()
    while disk.line and count:
        count -= 1
        kind, what = disk.line.popleft()
        match kind, what:
            case "write", (BlockKey() as key, list(content)):
                if is_good:
                    disk.files[key.name] = (key, content)
                    disk.damaged.discard(key.name)
                    disk.torn.discard(key.name)
                world.store.written(key.name, is_good=is_good)
            case "delete", str(name):
                disk.files.pop(name, None)
                disk.damaged.discard(name)
                disk.torn.discard(name)
            case "note", Told() as note:
                disk.journal[note.entry.key] = note
            case "note", bytes(key):
                disk.journal.pop(Digest(key), None)
    _note_displaced(world)


def damage(world: "World", index: int, *, is_torn: bool) -> None:
    """A file is not what it was. Nobody knows until it is read."""
    names = sorted(world.disk.files)
    if not names:
        return
    name = names[index % len(names)]
    world.disk.damaged.add(name)
    if is_torn:
        world.disk.torn.add(name)
    for prefix, known in world.expected.items():
        entry = world.entries.get(world.key_of[prefix])
        if entry is None or world.store is None:
            continue
        is_kept = entry.is_leased and entry.lease_tier == "disk"
        mine = [block for block in entry.blocks if block.tier == "disk"]
        mine += (entry.stored or []) if is_kept else []
        if any(world.store.key_of(block).name == name for block in mine):
            known.is_promised = False


def bring_from_disk(world: "World", life: Life) -> None:
    """One block comes from the store, or turns out to be lost."""
    store = world.store
    table = life.table
    assert store is not None
    if store.is_lost(table.next_incoming):
        _miss(world, life)
        return
    load = store.promote(table)
    if load is None:
        store.ask(table.arriving(), is_first=True)
        for key in store.take_asked():
            _read(world, key)
        if store.is_lost(table.next_incoming):
            _miss(world, life)
            return
        load = store.promote(table)
    assert load is not None
    world.memory[load.target] = [int(token) for token in load.payload.split()]


def _miss(world: "World", life: Life) -> None:
    lookup = None if life.is_started else life.found
    before = life.found.read if life.found else 0
    world.cache.miss(life.query, lookup, life.table)
    if lookup is not None and lookup.hit is not None and lookup.read < before:
        prefix = (life.query.scope, tuple(life.kept[: lookup.hit.tokens]))
        known = world.expected[prefix]
        known.expires_at = max(known.expires_at, lookup.hit.expires_at)
        known.used_at = max(known.used_at, life.query.arrived_at)
        known.is_promised |= lookup.hit.is_leased


def _read(world: "World", key: BlockKey) -> None:
    store, disk = world.store, world.disk
    assert store is not None
    # A file whose writing still waits is not asked for: only what was written is findable.
    there = disk.files.get(key.name)
    if there is not None and there[0] == key and key.name not in disk.damaged:
        store.arrived(key.name, " ".join(map(str, there[1])).encode())
        return
    assert key.name in disk.damaged, "a file is gone that was there"
    store.forget_read(key.name)
    block = store.block_of(key.name)
    if block is not None:
        world.entries.leases.take_ended()
        world.entries.damaged(block, world.now)
        for ended in world.entries.leases.take_ended():
            assert ended.reason == "damaged"
            prefix = world.meaning[ended.entry.key]
            if world.entries.get(ended.entry.key) is ended.entry:  # its content is above
                world.expected[prefix].is_promised = False
            else:
                del world.expected[prefix]
        queue_notes(world)


def content_on_disk(world: "World", block: Block) -> list[int] | None:
    """What the file of this block has, or will have. None if it is not to have any."""
    assert world.store is not None
    if world.store.is_lost(block):
        return None
    name = world.store.key_of(block).name
    if name in world.disk.damaged:
        return None
    for kind, what in reversed(world.disk.line):
        if kind == "write" and isinstance(what, tuple) and what[0].name == name:
            content = what[1]
            break
        assert (kind, what) != ("delete", name), "a file is deleted that is counted on"
    else:
        content = world.disk.files[name][1]
    return content[: len(block.tokens) // 4]


def restart(world: "World", *, is_planned: bool) -> None:
    """The process ends, after its work or at once, and another begins."""
    disk = world.disk
    assert world.store is not None
    for life in list(world.lives):
        world.end(life)
    if is_planned:
        while world.store.num_wanted:
            save(world)
            work(world)
        queue_notes(world)
        work(world)
        for entry in world.entries.live():
            record = disk.journal.get(entry.key)
            assert (record is not None) == (entry.stored is not None)
            assert record is None or record.entry.expires_at == entry.expires_at
            assert record is None or record.entry.is_leased == entry.is_leased
    before = world.expected
    world.expected = {}
    disk.line.clear()
    world.begin_epoch()
    for name in disk.torn & set(disk.files):
        del disk.files[name]
    disk.damaged -= disk.torn
    torn = disk.torn
    disk.torn = set()
    for record in disk.journal.values():
        is_there = _take_back(world, record, before, torn)
        assert is_there or not is_planned, "there was room for it before"
    # The journal is written anew, and what it does not tell of is deleted.
    disk.journal = {key: record for key, record in disk.journal.items() if world.entries.get(key)}
    for key, _ in list(disk.files.values()):
        if key.name not in world.store.names:
            del disk.files[key.name]
    queue_notes(world)
    world.wait(0)


def _take_back(
    world: "World", record: Told, before: dict[Prefix, Expected], torn: set[str]
) -> bool:
    """False where the store has no room: an end that was not written left its place taken."""
    entry = replace(record.entry, refreshed_until=[], blocks=[])
    if entry.expires_at <= world.now or set(record.names) & torn:
        return True
    assert set(record.names) <= set(world.disk.files), "the journal tells of files that are gone"
    keys = [world.disk.files[name][0] for name in record.names]
    if not world.entries.restore(entry, keys):
        return False
    prefix = world.meaning[entry.key]
    known = before.get(prefix)
    end = entry.expires_at
    assert known is None or known.expires_at >= end, "given more than was promised"
    is_promised = entry.is_leased and not set(record.names) & world.disk.damaged
    world.expected[prefix] = Expected(entry.ttl, end, entry.ready_at, is_promised, entry.used_at)
    return True
