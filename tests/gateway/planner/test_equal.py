"""What the planner says of an engine is what the engine's own core does, to the token."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from gateway.planner.engine import Capacities, Costs
from gateway.planner.fleet import Simulation
from gateway.planner.requests import PlannedRequest, Requests
from gateway.planning.traffic import Turn
from tests.gateway.planner.core import Core

COSTS = Costs(prefill=50e-6, decode=5e-3, step_tokens=512)
ROOMY = Capacities(
    device=40_000, max_running=32, ttl_scale=0.05, block_units=16, min_cache_tokens=64
)
SYSTEM, QUESTION, ANSWER, TAIL = 1003, 167, 24, 4


def talks(
    seed: int,
    num_talks: int,
    num_turns: int = 6,
    gap: float = 4.0,
    answer: int = ANSWER,
    num_scopes: int = 1,
) -> list[PlannedRequest]:
    """Conversations on two system prompts, with ends inside of blocks."""
    chance, numbers, turns = random.Random(seed), dict[object, int](), list[Turn]()

    def number(of: object) -> int:
        return numbers.setdefault(of, len(numbers))

    for talk in range(num_talks):
        at, which = chance.uniform(0, gap * num_turns), chance.randrange(2)
        ids, ends = [number(which)], [SYSTEM + which]
        for turn in range(num_turns):
            ids.append(number((talk, turn)))
            ends.append(ends[-1] + QUESTION + chance.randrange(100))
            places = list(range(len(ids)))
            marks = [(0, "5m"), (len(ids) - 1, "5m")]
            scope = talk % num_scopes
            turns.append(Turn(at, scope, [*ids], [*ends], places, marks, answer, TAIL))
            at += 0.2 + chance.expovariate(1 / gap)
            ids.append(number((talk, turn, "said")))
            ends.append(ends[-1] + answer)
    made = Requests(1, with_names=False)
    return [made.of(turn) for turn in sorted(turns, key=lambda turn: turn.at)]


def compare(capacities: Capacities, requests: list[PlannedRequest], costs: Costs = COSTS) -> Core:
    core = Core(capacities, costs)
    core.run(requests)
    planned = Simulation(1, capacities, costs, 1, None).replay(requests)
    served = {requests.index(each.request): each for each in planned.served}
    assert served.keys() == core.told.keys()
    for number, told in sorted(core.told.items()):
        found, request = served[number], requests[number]
        read = min(told.read, request.tokens_at(len(request.known)))
        assert (number, found.read) == (number, read)
        assert (number, request.tokens - found.reused) == (number, told.computed)
        assert request.at + found.wait == pytest.approx(told.started_at, abs=1e-6), number
    assert planned.leases == Counter(core.ends)
    assert planned.preempted == core.scheduler.num_preempted
    return core


@pytest.mark.parametrize("blocks", [250, 400, 2500])
def test_reads_are_equal_to_the_token_in_tight_and_roomy_pools(blocks: int) -> None:
    for seed, least in ((0, 64), (1, SYSTEM + 700)):
        capacities = replace(ROOMY, device=blocks * 16, min_cache_tokens=least)
        core = compare(capacities, talks(seed, 12))
        assert sum(told.read for told in core.told.values()) > 0


def test_answers_that_find_no_block_preempt_the_same_turns() -> None:
    requests = talks(1, 10, num_turns=2, gap=0.3, answer=500)
    core = compare(replace(ROOMY, device=260 * 16), requests)
    assert core.scheduler.num_preempted > 0


def test_equal_cold_prompts_are_computed_once() -> None:
    requests = talks(1, 1, num_turns=1) * 3
    twins = [replace(request, at=1.0 + n / 1000) for n, request in enumerate(requests)]
    core = compare(ROOMY, twins)
    size = requests[0].tokens
    assert core.told[0].computed == size and core.told[2].computed < size / 2


def test_what_expired_is_spared_as_long_as_engines_spare_it() -> None:
    """The grace for late turns keeps expired content, which costs others their room."""
    requests, differing = talks(3, 16), 0
    for blocks in (300, 400):
        tight = replace(ROOMY, device=blocks * 16)
        kept = compare(tight, requests)
        forgot = compare(replace(tight, grace_seconds=0.0), requests)
        differing += _computed(kept) != _computed(forgot)
    assert differing


def _computed(core: Core) -> int:
    return sum(told.computed for told in core.told.values())
