"""The benchmark of orders of reuse: its models against brute force, and the engine against them."""

import json
import random
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import pytest

from scripts.bench.reuse.engine_replay import EngineReplay, replay_engine
from scripts.bench.reuse.models import SPARE_BLOCKS, fits, replay_belady, replay_lru
from scripts.bench.reuse.traces import (
    CONVERSATIONS,
    SESSIONS,
    Prompt,
    Request,
    Trace,
    TraceMissing,
    agents,
    conversations,
    new_trace,
    starved,
)

SIZE = 4


def random_trace(
    seed: int,
    num_prompts: int,
    num_ways: int = 2,
    depth: int = 3,
    behind: Sequence[int] = (0, 0, 1, SIZE - 1),
) -> Trace:
    """Prompts that part from each other at random, with so many tokens behind whole blocks."""
    draw = random.Random(seed)

    def prompts() -> Iterator[Prompt]:
        for number in range(num_prompts):
            path = tuple(draw.randrange(num_ways) for _ in range(draw.randint(1, depth)))
            names = [path[: place + 1] for place in range(len(path))]
            group = draw.choice(["long", "short"])
            tokens = SIZE * len(path) + draw.choice(behind)
            yield Prompt(float(number), names, tokens, group=group)

    return new_trace(SIZE, prompts())


def readable(request: Request) -> list[int]:
    return list(request.blocks[: (request.tokens - 1) // SIZE])


def whole(request: Request) -> list[int]:
    return list(request.blocks[: request.tokens // SIZE])


def slow_lru(trace: Trace, num_blocks: int) -> int:
    """Blocks read, by looking at the times of use of every block."""
    used: dict[int, tuple[int, int]] = {}
    num_read = 0
    for number, request in enumerate(trace.requests):
        if not fits(request, num_blocks):
            continue
        hit = 0
        for block in readable(request):
            if block not in used:
                break
            hit += 1
        prefix = set(request.blocks[:hit])
        while len(used) + len(request.blocks) - hit > num_blocks:
            victim = min(
                (block for block in used if block not in prefix),
                key=lambda candidate: used[candidate],
            )
            del used[victim]
        for place, block in enumerate(whole(request)):
            used[block] = (number, -place)
        num_read += hit
    return num_read


def best(trace: Trace, num_blocks: int) -> int:
    """The most blocks that any choice of what to keep reads: all of them are tried."""
    reached: dict[frozenset[int], int] = {frozenset(): 0}
    for request in trace.requests:
        if not fits(request, num_blocks):
            continue
        after: dict[frozenset[int], int] = {}
        needed = set(request.blocks)
        for blocks, num_read in reached.items():
            hit = 0
            for block in readable(request):
                if block not in blocks:
                    break
                hit += 1
            unneeded = sorted(blocks - needed)
            room = num_blocks - len(needed)
            for count in range(min(room, len(unneeded)) + 1):
                for spared in combinations(unneeded, count):
                    state = frozenset(spared) | set(whole(request))
                    after[state] = max(after.get(state, 0), num_read + hit)
        reached = after
    return max(reached.values())


@pytest.mark.parametrize("seed", range(60))
def test_lru_is_that_of_a_slow_count(seed: int) -> None:
    trace = random_trace(seed, 60)
    for num_blocks in (3 + SPARE_BLOCKS, 4 + SPARE_BLOCKS, 8 + SPARE_BLOCKS):
        reads = replay_lru(trace, num_blocks)
        assert reads.read.total() == SIZE * slow_lru(trace, num_blocks)


@pytest.mark.parametrize("seed", range(60))
def test_no_choice_reads_more_than_belady(seed: int) -> None:
    trace = random_trace(seed, 9)
    for num_blocks in (3 + SPARE_BLOCKS, 5 + SPARE_BLOCKS):
        reads = replay_belady(trace, num_blocks)
        assert reads.read.total() == SIZE * best(trace, num_blocks)
        assert reads.read.total() >= replay_lru(trace, num_blocks).read.total()


@pytest.mark.parametrize("seed", range(20))
def test_without_marks_the_engine_is_lru(seed: int) -> None:
    """The same memory: not one token more or less is read, by any group."""
    trace = random_trace(seed, 400, num_ways=4, depth=6)
    for num_blocks in (8, 16, 64):
        ours = replay_engine(trace, num_blocks, "off")
        theirs = replay_lru(trace, num_blocks)
        assert (ours.read, ours.prompt, ours.num_refused) == (
            theirs.read,
            theirs.prompt,
            theirs.num_refused,
        )


@pytest.mark.parametrize("marks", ["marked", "unmarked"])
def test_an_engine_with_room_reads_all_that_came_before(marks: str) -> None:
    prompts = [Prompt(float(n), [("a", place) for place in range(512)], 2048) for n in range(3)]
    trace = new_trace(SIZE, prompts)
    replay = EngineReplay(2048, SIZE, "marked" if marks == "marked" else "unmarked")
    assert [replay.run(request) for request in trace.requests] == [0, 2047, 2047]
    assert replay.pool.counts().active == 0


def test_short_prompts_after_unmarked_chats_are_read_as_before_them() -> None:
    """They have no entry, and are reused by plain recency all the same."""
    reads = replay_engine(starved(), 2048, "unmarked")
    assert reads.read == replay_lru(starved(), 2048).read
    assert reads.share_of("4 again") == reads.share_of("2 again") > 0.9


def test_a_block_that_nobody_names_is_nobody_elses() -> None:
    trace = new_trace(SIZE, [Prompt(0.0, ["a"], 6), Prompt(1.0, ["a", "b"], 8)])
    first, second = trace.requests
    assert (first.known, second.known) == (0, 1)
    assert first.blocks[0] == second.blocks[0] and first.blocks[1] != second.blocks[1]


def test_lru_reads_the_short_prompts_after_chats_as_before() -> None:
    reads = replay_lru(starved(), 2048)
    assert reads.share_of("1 first") == reads.share_of("3 after the chats") > 0.6
    assert reads.share_of("2 again") == reads.share_of("4 again") > 0.9


def test_public_traces_are_read_from_a_folder(tmp_path: Path) -> None:
    lines = [
        {"timestamp": 0, "input_length": 600, "output_length": 9, "hash_ids": [0, 1]},
        {"timestamp": 1500, "input_length": 1100, "output_length": 9, "hash_ids": [0, 2, 3]},
    ]
    (tmp_path / CONVERSATIONS).write_text("\n".join(map(json.dumps, lines)))
    first, second = conversations(tmp_path).requests
    assert (first.at, first.tokens, first.group) == (0.0, 600, "short")
    assert (second.at, second.tokens, second.known, second.group) == (1.5, 1100, 1, "long")

    (tmp_path / "agentic").mkdir()
    for number in SESSIONS:
        calls = [
            {"t": 0.0, "in": 1300, "hash_ids": list(range(20))},
            {"t": 5.0, "in": 1290, "hash_ids": [*range(19), 99]},
            {"t": 6.0, "in": 70},  # a call without a prompt
        ]
        file = tmp_path / "agentic" / f"trace_{number:04}.json"
        file.write_text(json.dumps({"requests": calls}))
    requests = agents(tmp_path).requests
    assert len(requests) == 2 * 3 * len(SESSIONS)
    assert [request.at for request in requests] == sorted(request.at for request in requests)
    assert {request.known for request in requests} == {0, 19}


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceMissing, match=CONVERSATIONS):
        conversations(tmp_path)
    with pytest.raises(TraceMissing, match="trace_0067"):
        agents(tmp_path)
