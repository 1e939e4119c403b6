"""Whoever follows an engine's events knows the names that it holds, after every step."""

import random
import time
from pathlib import Path

import pytest

from engine.clock import ManualClock
from engine.protocol import ChainGone, ChainHeld
from tests.engine.schedule.harness import Harness, words
from tests.engine.store.engines import StoredEngine

NUM_PROMPTS = 60


def held_in(engine: Harness) -> dict[str, str]:
    """The tier of each name that the engine's blocks have."""
    tiers = [engine.cache.pool]
    tiers += [engine.host.pool] if engine.host is not None else []
    tiers += [store.pool for store in engine.cache.stores]
    return {name: block.tier for pool in tiers for block in pool.blocks for name in block.names}


def followed(engine: Harness) -> dict[str, str]:
    """The tier of each name, as the events say."""
    tiers: dict[str, str] = {}
    for event in engine.events:
        if isinstance(event, ChainGone):
            for name in event.names:
                tiers.pop(name, None)
        elif isinstance(event, ChainHeld):
            tiers |= {name.digest: event.tier for name in event.names}
    return tiers


def pass_time(engine: Harness, seconds: float) -> None:
    assert isinstance(engine.clock, ManualClock)
    engine.clock.advance(seconds)


def ask_some(engine: Harness, rng: random.Random) -> None:
    """One to three prompts that share beginnings with those before, some of them marked."""
    sents = []
    for _ in range(rng.randint(1, 3)):
        segments = [words(100, 9), words(200 + rng.randrange(3), rng.randint(1, 9))]
        segments.append(words(300 + rng.randrange(3), rng.randint(1, 9)))
        del segments[rng.randint(1, 3) :]
        marks = {len(segments) - 1: rng.choice(["5m", "1h"])} if rng.random() < 0.5 else {}
        scope = rng.choice("st")
        sents.append(engine.send(*segments, marks=marks, scope=scope, has_names=True))
    while not all(turn.is_over for turn in sents):
        engine.step()
        engine.accounting.publish()
        assert followed(engine) == held_in(engine)


@pytest.mark.parametrize("host_blocks", [0, 6, 40])
def test_a_pool_under_pressure_and_its_host_tier(host_blocks: int) -> None:
    engine = Harness(num_blocks=10, host_blocks=host_blocks)
    rng = random.Random(host_blocks)
    for _ in range(NUM_PROMPTS):
        ask_some(engine, rng)
        pass_time(engine, rng.choice([0.0, 1.0, 400.0]))
    assert any(isinstance(event, ChainGone) for event in engine.events)


def test_engines_that_share_a_store(tmp_path: Path) -> None:
    """What others write, and for how long, changes while this engine reads it."""
    rng = random.Random(1)
    engines = [StoredEngine(tmp_path / "store", is_shared=True, num_blocks=14) for _ in range(2)]
    for _ in range(NUM_PROMPTS // 3):
        ask_some(rng.choice(engines), rng)
        seconds = rng.choice([0.0, 1.0, 400.0])
        for engine in engines:
            pass_time(engine, seconds)
            engine.settle()
        time.sleep(0.05)
        for engine in engines:
            for _ in range(3):
                engine.step()
                engine.accounting.publish()
                assert followed(engine) == held_in(engine)
    for engine in engines:
        engine.kill()
