"""The worked example of engine/README.md: ten blocks of four tokens, time 1 to time 7."""

from engine.protocol import InputUsage
from engine.protocol.reports import BlockCell
from tests.engine.cache.lives import Life
from tests.engine.cache.world import World

A = [*range(100, 110)]
B = [*A[:6], *range(206, 210)]
FLOOD = [*range(300, 330)]


def begun(world: World, tokens: list[int], *, is_marked: bool = True) -> tuple[Life, InputUsage]:
    """A prompt of two segments, computed: six tokens, which may be marked, and the rest."""
    marks = {0: "5m"} if is_marked else {}
    life = world.arrive("scope", [tokens[:6], tokens[6:]], marks, scaffold=(), min_cache_tokens=4)
    assert world.begin(life)
    world.compute(life, life.pending)
    return life, world.start(life).usage


def counts(free: int, active: int, leased: int, cached: int, shared: int = 0) -> BlockCell:
    return BlockCell(
        free=free, active=active, leased=leased, best_effort=0, cached=cached, shared=shared
    )


def test_the_worked_example_of_the_readme() -> None:
    world = World()

    # Time 1: a prompt of ten tokens, marked after six.
    first, usage = begun(world, A)
    assert list(first.table.block_ids) == [0, 1, 2]
    assert (usage.cache_write_5m_tokens, usage.computed_tokens) == (6, 10)
    assert world.pool.counts() == counts(free=7, active=3, leased=0, cached=0, shared=2)

    # Time 2: it decodes two tokens into its own block and ends.
    assert world.decode(first, 900) and world.decode(first, 901)
    assert list(first.table.block_ids) == [0, 1, 2] and world.pool.num_copied == 0
    world.end(first)
    assert world.pool.counts() == counts(free=7, active=0, leased=2, cached=1)

    # Time 3: a second prompt with the same first six tokens.
    world.wait(10)
    second, usage = begun(world, B)
    assert list(second.table.block_ids) == [0, 3, 4] and world.pool.num_copied == 1
    assert (usage.cache_read_tokens, usage.computed_tokens) == (6, 4)
    assert world.pool.counts() == counts(free=5, active=3, leased=1, cached=1, shared=1)

    # Time 4: a fork. Whoever writes first copies the tail; the other may then write in place.
    fork = world.fork(second)
    assert list(fork.table.block_ids) == [0, 3, 4]
    assert world.decode(fork, 910) and world.pool.num_copied == 2
    assert world.decode(second, 911) and world.pool.num_copied == 2
    assert list(fork.table.block_ids) == [0, 3, 5]
    assert list(second.table.block_ids) == [0, 3, 4]
    assert world.pool.counts() == counts(free=4, active=4, leased=1, cached=1, shared=2)

    # Time 5: both end.
    world.end(fork)
    world.end(second)
    assert world.pool.counts() == counts(free=6, active=0, leased=2, cached=2)

    # Time 6: a flood of thirty unmarked tokens takes everything but the lease.
    world.wait(10)
    flood, _ = begun(world, FLOOD, is_marked=False)
    assert list(flood.table.block_ids) == [4, 5, 6, 7, 8, 9, 2, 3]
    assert world.pool.counts() == counts(free=0, active=8, leased=2, cached=0)
    world.end(flood)
    world.check()

    # Time 7: 300 s after the last read the lease ends, to the moment.
    world.wait(289.9)
    assert world.pool.counts() == counts(free=1, active=0, leased=2, cached=7)
    world.wait(0.1)
    assert world.pool.counts() == counts(free=1, active=0, leased=0, cached=9)
