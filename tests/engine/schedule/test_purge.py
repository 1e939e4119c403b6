"""A purge in the midst of traffic: no answer changes, and nothing of the scope is left."""

import random

import pytest

from engine.cache.ids import Digest
from engine.protocol import Ttl
from tests.engine.schedule.harness import Harness, Sent, words

SCOPES = ("purged", "neighbour")
STARTS = {"purged": 100_000, "neighbour": 500_000}
"""No word is of both scopes, and none of them is an answer's."""
TTLS: tuple[Ttl, ...] = ("5m", "1h")


def purge(engine: Harness, scope: str | None) -> int:
    """Return how many blocks running requests still use."""
    engine.accounting.drop(scope, None, "dropped")
    owner = None if scope is None else engine.cache.digests(scope, []).root
    pools = [engine.pool] if engine.host is None else [engine.pool, engine.host.pool]
    purged = [engine.loop.purge(pool, owner, 0, pool.num_blocks) for pool in pools]
    return sum(len(part.busy) for part in purged)


def left_of(engine: Harness, scope: str) -> list[int]:
    """The scope's words in the memory of all tiers, and in what the books say of it."""
    memory = [slot for block in engine.runner.memory + engine.runner.host for slot in block]
    pools = [engine.pool] if engine.host is None else [engine.pool, engine.host.pool]
    for pool in pools:
        for block in pool.blocks:
            memory += memoryview(bytes(block.tokens)).cast("I").tolist()
    return [slot for slot in memory if STARTS[scope] <= slot < STARTS[scope] + 100_000]


@pytest.mark.parametrize("seed", range(12))
def test_a_purge_among_running_requests_changes_no_answer(seed: int) -> None:
    chance = random.Random(seed)
    engine = Harness(
        num_blocks=chance.choice([40, 64]), host_blocks=chance.choice([0, 48, 96]), max_copies=3
    )
    running: list[Sent] = []
    for _ in range(60):
        scope = chance.choice(SCOPES)
        first = STARTS[scope] + 1000 * chance.randrange(3)
        segments = [words(first, chance.choice([6, 9, 16])), words(first + 500, 5)]
        marks = {0: chance.choice(TTLS)} if chance.random() < 0.7 else None
        running.append(
            engine.send(*segments, marks=marks, scope=scope, choices=chance.choice([1, 2]))
        )
        engine.step(chance.randrange(4))
        if chance.random() < 0.25:
            purge(engine, "purged")
            assert not engine.cache.entries.live() or {
                entry.scope for entry in engine.cache.entries.live()
            } == {"neighbour"}
        if chance.random() < 0.3:
            engine.finish(*running)
            running = []
    engine.finish(*running)
    turn = engine.done(words(STARTS["neighbour"], 20), marks={0: "5m"}, scope="neighbour")
    assert turn.started is not None

    assert purge(engine, "purged") == 0
    engine.step()
    assert left_of(engine, "purged") == []
    again = engine.done(words(STARTS["neighbour"], 20), marks={0: "5m"}, scope="neighbour")
    assert again.usage.cache_read_tokens > 0, "the neighbour's content is there"
    assert purge(engine, None) == 0
    assert left_of(engine, "neighbour") == []
    assert engine.pool.num_empty == engine.pool.num_blocks
    engine.check_idle()


def test_what_runs_is_told_and_nobody_finds_it_any_more() -> None:
    engine = Harness()
    long = words(STARTS["purged"], 40)
    turn = engine.send(long, marks={0: "5m"}, scope="purged", max_tokens=30)
    while turn.started is None:
        engine.step()
    assert purge(engine, "purged") > 0
    next_turn = engine.send(long, marks={0: "5m"}, scope="purged", max_tokens=2)
    engine.finish(next_turn)
    assert next_turn.begun.miss_reason == "dropped"
    assert (next_turn.usage.cache_read_tokens, next_turn.usage.automatic_tokens) == (0, 0)
    engine.finish(turn)
    assert purge(engine, "purged") == 0
    assert left_of(engine, "purged") == []


def test_nobody_owns_a_block_that_was_purged() -> None:
    engine = Harness()
    engine.done(words(STARTS["purged"], 40), marks={0: "5m"}, scope="purged")
    purge(engine, "purged")
    assert {block.owner for block in engine.pool.blocks} == {Digest(b"")}
