"""A pool that learns nothing goes by plain LRU, and a mark leases what the gateway wrote."""

import random
from collections.abc import Sequence

import pytest

from engine.cache.block import Entry
from tests.engine.cache.disk import save, work
from tests.engine.cache.world import World

SIZE = 4
Words = tuple[tuple[int, ...], ...]


class LeastRecentlyUsed:
    """A cache of `num_blocks` blocks by their content and all before it, chains from the tail."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._order: dict[Words, None] = {}

    def run(self, prompt: Words) -> int:
        """Read the longest prefix that is there, then use all blocks. Return the blocks read.

        One block more is in use meanwhile, for the prompt's last token.
        """
        prefixes = [prompt[: end + 1] for end in range(len(prompt))]
        present = [prefix for prefix in prefixes if prefix in self._order]
        for prefix in present:
            del self._order[prefix]
        while len(self._order) + len(prompt) + 1 > self._num_blocks:
            del self._order[next(iter(self._order))]
        self._order.update(dict.fromkeys(reversed(prefixes)))
        return len(present)


def prompts(draw: random.Random, count: int) -> list[Words]:
    """Prompts of one to seven blocks: conversations that grow, common beginnings, strangers."""
    talks: list[Words] = []
    lines: list[Words] = []
    for number in range(count):
        kind = draw.random()
        block = (1000 + number,) * SIZE
        if kind < 0.4 and talks:
            place = draw.randrange(len(talks))
            prompt = (*talks[place][:6], block)
            talks[place] = prompt
        elif kind < 0.7:
            system = draw.randrange(5)
            prompt = (*(((system, part, 0, 0)) for part in range(3)), block)
            talks.append(prompt)
        else:
            prompt = tuple((2000 + number, part, 0, 0) for part in range(draw.randint(1, 7)))
            talks.append(prompt)
        lines.append(prompt)
    return lines


def marks_of(draw: random.Random, prompt: Words) -> list[int]:
    """Breakpoints behind blocks, as the gateway adds them; now and then none."""
    ends = range(len(prompt))
    return sorted(draw.sample(ends, min(len(prompt), draw.randint(0, 3))))


@pytest.mark.parametrize("num_blocks", [9, 16, 40])
@pytest.mark.parametrize("seed", range(8))
def test_unmarked_prompts_of_one_scope_reuse_what_lru_reuses(seed: int, num_blocks: int) -> None:
    draw = random.Random(seed)
    world = World(num_blocks=num_blocks, marks_hold=False)
    model = LeastRecentlyUsed(num_blocks)
    for prompt in prompts(draw, 250):
        places = marks_of(draw, prompt)
        life = world.run("red", prompt, dict.fromkeys(places, "5m"))
        assert life.found is not None
        assert life.found.reused == model.run(prompt) * SIZE
        world.end(life)
        world.wait(draw.choice((0.1, 5.0, 100.0)))
    world.check()
    assert world.pool.num_evicted and not world.pool.num_leased


def texts(first: int, count: int) -> Sequence[tuple[int, ...]]:
    return [(first + number,) * SIZE for number in range(count)]


@pytest.mark.parametrize("is_marked", [False, True], ids=["automatic", "marked"])
def test_short_prompts_are_reused_behind_chats_that_never_come_back(is_marked: bool) -> None:
    """Fourteen chats are 1.8 times the memory; forty short prompts share five beginnings."""
    world = World(num_blocks=256, marks_hold=is_marked)
    for chat in range(14):
        world.end(world.run("red", texts(1000 * (chat + 1), 32), {31: "5m"}))
        world.wait(1)
    reused = total = 0
    for number in range(40):
        short = [*texts(100 * (number % 5 + 1), 3), (50_000 + number,) * SIZE]
        life = world.run("red", short, {})
        assert life.found is not None
        reused += life.found.reused
        total += len(life.query.tokens)
        world.end(life)
        world.wait(1)
    assert reused == 35 * 3 * SIZE and reused / total > 0.6


def entry_of(world: World, *segments: tuple[int, ...]) -> Entry:
    entry = world.entry_at("red", *segments)
    assert entry is not None
    return entry


def test_a_mark_leases_what_the_gateway_wrote_and_keeps_the_lease() -> None:
    world = World(num_blocks=20, marks_hold=False)
    first, second, third = texts(100, 3)
    world.end(world.run("red", [first, second], {0: "5m", 1: "5m"}))
    for segments in ([first], [first, second]):
        entry = entry_of(world, *segments)
        assert (entry.state, entry.why_unleased) == ("best_effort", "automatic")
    world.check()
    # The client's own mark stands behind the first text: that entry alone is asked for.
    world.marks_hold = True
    world.end(world.run("red", [first, third], {0: "5m"}))
    assert entry_of(world, first).state == "leased"
    assert entry_of(world, first, second).why_unleased == "automatic"
    # What the gateway adds later refreshes that lease, and asks for no other.
    world.marks_hold = False
    world.wait(200)
    world.end(world.run("red", [first, second], {0: "5m", 1: "5m"}))
    world.wait(200)
    assert entry_of(world, first).state == "leased"
    assert entry_of(world, first, second).why_unleased == "automatic"
    world.check()
    # A mark behind an entry reads and leases it too.
    world.marks_hold = True
    world.end(world.run("red", [first, second, third], {2: "5m"}))
    assert entry_of(world, first, second).state == "leased"
    world.check()


def test_a_leased_prefix_that_a_request_waited_for_is_used_then_when_its_lease_ends() -> None:
    """The request never runs: its blocks count as used when it came."""
    world = World(num_blocks=20)
    first, second = texts(100, 2)
    for text in (first, second):
        world.end(world.run("red", [text], {0: "5m"}))
    queries = [world.query("red", [text], {}) for text in (first, second)]
    world.cache.touch(queries[0].digests)
    world.wait(301)
    assert not world.pool.num_leased
    digests = [query.digests.full[0] for query in queries]
    for number in range(100):
        if world.pool.peek(digests[1]) is None:
            break
        world.end(world.run("red", [(9000 + number,) * SIZE], {}))
    assert [world.pool.peek(digest) is None for digest in digests] == [False, True]
    world.check()


def test_an_automatic_entry_ends_with_its_ttl() -> None:
    world = World(num_blocks=20, marks_hold=False)
    (text,) = texts(100, 1)
    world.end(world.run("red", [text], {0: "5m"}))
    world.wait(299)
    assert world.entry_at("red", text) is not None
    world.wait(2)
    assert world.entry_at("red", text) is None


def test_the_store_keeps_a_copy_of_what_nobody_asked_for_without_a_lease() -> None:
    world = World(num_blocks=20, store_blocks=40, marks_hold=False)
    first, second = texts(100, 2)
    world.end(world.run("red", [first, second], {1: "5m"}))
    save(world)
    work(world)
    entry = entry_of(world, first, second)
    assert entry.stored is not None
    assert (entry.state, entry.why_unleased) == ("best_effort", "automatic")
    world.check()
