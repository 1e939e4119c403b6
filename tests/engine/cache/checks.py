"""What must hold of a world at any time, counted from what its requests were told."""

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from engine.cache.block import Block
from tests.engine.cache.disk import content_on_disk

if TYPE_CHECKING:
    from tests.engine.cache.world import World


def check(world: "World") -> None:
    world.pool.check()
    world.entries.check()
    world.host.check()
    if world.store is not None:
        world.store.check()
    _check_references(world)
    for life in world.lives:
        held = life.found.held if life.found else []
        if held:
            assert life.found is not None
            _check_content(world, held, life.tokens[: life.found.read])
        _check_content(world, life.table.blocks, life.tokens[: life.table.num_tokens])
        for index, count in life.table.beyond.items():
            start = index * world.block_size
            wanted = life.tokens[start : start + count]
            if index in life.table.incoming:
                _check_content(world, [life.table.incoming[index]], wanted)
                continue
            _check_content(world, [life.table.blocks[index]], wanted)
    for entry in world.entries.live():
        scope, tokens = world.meaning[entry.key]
        assert entry.scope == scope and entry.tokens == len(tokens)
        _check_content(world, entry.blocks, tokens)
    for prefix, known in world.expected.items():
        present = world.entries.get(world.key_of[prefix])
        if known.is_promised and known.expires_at > world.now:
            assert present is not None and present.is_leased, "a promise was broken"
        if present is not None and not present.is_broken:
            assert (present.ttl, present.expires_at) == (known.ttl, known.expires_at)
    for block in world.blocks():
        if block.digest is not None:
            _, tokens = world.meaning.get(block.digest, ("", ()))
            if tokens:
                _check_content(world, [block], tokens[-world.block_size :])


def _check_content(world: "World", blocks: Sequence[Block], tokens: Sequence[int]) -> None:
    held: list[int] = []
    for position, block in enumerate(blocks):
        if block.tier == "disk":
            found = content_on_disk(world, block)
            start = position * world.block_size
            held += found or tokens[start : start + world.block_size]
            continue
        memory = world.host_memory if block.is_away else world.memory
        held += memory[block.block_id]
    assert held[: len(tokens)] == list(tokens), "other content than promised"


def _check_references(world: "World") -> None:
    wanted: Counter[Block] = Counter()
    for life in world.lives:
        wanted.update(life.table.blocks)
        wanted.update(life.table.incoming.values())
        if life.found is not None:
            wanted.update(life.found.held)
    for entry in world.entries.live():
        if entry.is_leased and entry.lease_tier == "device":
            wanted.update(entry.blocks)
    if world.store is not None:
        for job in world.store._jobs.values():
            wanted.update(job.blocks)
        wanted.update(pending.block for pending in world.store._pending.values())
        for entry in world.store.holds.entries():
            wanted.update(entry.stored or ())
    for block in world.blocks():
        assert block.ref_count == wanted[block], "references do not add up"
