"""A turn that ended teaches the order of reuse; one that still runs does not."""

from engine.cache.worth import class_of
from tests.engine.schedule.harness import Harness, words


def test_a_turns_blocks_are_of_the_class_of_its_uses_end_and_distance() -> None:
    engine = Harness()
    turn = engine.send(words(100, 12), max_tokens=4)
    engine.step(2)
    digests = engine.cache.digests("s", words(100, 12)).full
    blocks = [engine.pool.peek(digest) for digest in digests]
    assert all(block is not None and block.use_class == -1 for block in blocks), "it still runs"
    engine.finish(turn)
    assert turn.finishes[0].reason == "length"
    num_blocks = len(digests) + 1  # the scaffold and the answer are in one block more
    for place, block in enumerate(blocks):
        assert block is not None and block.num_uses == 1
        assert block.use_class == class_of(1, "other", num_blocks - place)
    engine.finish(engine.send(words(100, 12), max_tokens=4))
    assert [block.num_uses for block in blocks if block is not None] == [2] * len(blocks)
