"""Random turns with restarts among them: every answer is that of an engine without any memory."""

import os
import random
from pathlib import Path

import pytest

from tests.engine.store.engines import StoredEngine

SEEDS = int(os.environ.get("STORE_FUZZ_SEEDS", "8"))


@pytest.mark.parametrize("seed", range(SEEDS))
def test_answers_do_not_depend_on_restarts(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    engine = StoredEngine(
        tmp_path / "store",
        store_bytes=rng.choice([2**20, 2**22]),
        host_blocks=rng.choice([0, 0, 100]),
        num_blocks=rng.choice([24, 48]),
    )
    begins = [[rng.randrange(1, 300) for _ in range(rng.randrange(3, 30))] for _ in range(5)]
    for _ in range(30):
        kind = rng.random()
        if kind < 0.12:
            is_killed = rng.random() < 0.5
            if is_killed:
                engine.settle()
            # What a planned end writes may displace a copy of a scope that has more.
            engine.end(is_killed=is_killed)
            before, engine = stored(engine), engine.next()
            after = stored(engine)
            assert {key: after.get(key) for key in before} == before, "a stored lease is not there"
            continue
        if kind < 0.2:
            engine.clock.advance(rng.choice([1.0, 299.0, 3600.0]))  # type: ignore[attr-defined]
            engine.step()
            continue
        sents = []
        for _ in range(rng.randrange(1, 4)):
            segments = [
                rng.choice(begins),
                [rng.randrange(300) for _ in range(rng.randrange(1, 9))],
            ]
            marks = {rng.randrange(2): rng.choice(["5m", "1h"])}
            scope = rng.choice(["a", "b"])
            sents.append(engine.send(*segments, marks=marks, scope=scope))  # type: ignore[arg-type]
            engine.step(rng.randrange(3))
        engine.finish(*sents)
    engine.settle()
    engine.kill()


def stored(engine: StoredEngine) -> dict[bytes, tuple[int, bool]]:
    """The leases that outlive a restart: their tokens, and that they are leases."""
    return {
        entry.key: (entry.tokens, entry.is_leased)
        for entry in engine.entries.live()
        if entry.stored is not None and entry.is_leased
    }
