"""Prompt look-up: what is proposed, and what it costs to look."""

import random
import time

from engine.compute.speculate import LEAST_MATCH, MOST_MATCH, NgramDrafter


def test_a_proposal_is_shorter_after_a_wrong_one_and_grows_back() -> None:
    drafter, tokens = NgramDrafter(8), [1, 2] * 20
    lengths = []
    for num_accepted in (8, 0, 1, 2, 4, 3):
        proposed = len(drafter.propose(tokens))
        lengths.append(proposed)
        drafter.verified(proposed, min(num_accepted, proposed))
    assert lengths == [8, 8, 1, 2, 4, 8]
    assert len(drafter.propose(tokens)) == 4


def test_proposals_equal_a_plain_search() -> None:
    rng = random.Random(4)
    for _ in range(300):
        tokens = [rng.randrange(4) for _ in range(rng.randint(2, 40))]
        drafter, seen = NgramDrafter(5), tokens[: rng.randint(1, len(tokens))]
        drafter.propose(seen)
        assert drafter.propose(tokens) == plainly(tokens, 5)


def plainly(tokens: list[int], count: int) -> list[int]:
    for matched in range(MOST_MATCH, LEAST_MATCH - 1, -1):
        tail = tokens[-matched:]
        for end in range(len(tokens) - 1, matched - 1, -1):
            if len(tail) == matched and tokens[end - matched : end] == tail:
                loop = tokens[end:]
                return [loop[index % len(loop)] for index in range(count)]
    return []


def test_a_search_is_linear_whatever_the_tokens() -> None:
    """The worst of several kinds of long texts, at the CPU: ten times as long is no 30 times."""
    seconds = []
    for length in (12_000, 120_000):
        rng = random.Random(1)
        texts = ([7] * length, [1, 2] * (length // 2), [rng.randrange(3) for _ in range(length)])
        worst = 0.0
        for text in texts:
            drafter = NgramDrafter(8)
            drafter.propose(text)
            times = []
            for _ in range(9):
                text.append(7)
                begun = time.thread_time()
                drafter.propose(text)
                times.append(time.thread_time() - begun)
            worst = max(worst, min(times))
        seconds.append(worst)
    assert seconds[1] < 30 * max(seconds[0], 1e-4)
