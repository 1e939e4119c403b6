"""The exact curve against a memory that is really kept, and units against exact tokens."""

from collections import OrderedDict

import pytest

from gateway.planner.requests import PlannedRequest, Requests, distances
from gateway.planning.traffic import total_tokens
from tests.gateway.planner.made_traffic import MadeTraffic, made_up

TRAFFIC = MadeTraffic(tenants=3, conversations=5, turns=6, hours=0.2, system_tokens=640, seed=4)


def requests(unit: int = 32) -> list[PlannedRequest]:
    builder = Requests(unit, with_names=False)
    return [builder.of(turn) for turn in made_up(TRAFFIC)]


def kept(planned: list[PlannedRequest], size: int) -> float:
    """What a memory of this many units gives, by keeping it."""
    memory: OrderedDict[int, None] = OrderedDict()
    read_tokens = 0
    for request in planned:
        known = request.shared_units
        depth = next((n for n, u in enumerate(known) if u not in memory), len(known))
        read_tokens += request.tokens_at(depth)
        for unit in reversed(known):
            memory[unit] = None
            memory.move_to_end(unit)
        while len(memory) > size:
            memory.popitem(last=False)
    return read_tokens / sum(request.tokens for request in planned)


def test_the_curve_is_what_a_memory_of_that_size_gives_and_its_knee_the_smallest() -> None:
    planned = requests()
    exact = distances(planned, sum(len(request.units) for request in planned))
    sizes = [1, 7, 40, 100, 300, 10_000]
    assert exact.curve(sizes) == pytest.approx([kept(planned, size) for size in sizes])
    size = exact.size_for(0.9)
    assert kept(planned, size) >= 0.9 * kept(planned, 10**9) > kept(planned, size - 1)


@pytest.mark.parametrize("unit", [16, 100, 333])
def test_units_are_right_on_average_and_tokens_exact(unit: int) -> None:
    turns = made_up(TRAFFIC)
    builder = Requests(unit, with_names=False)
    planned = [builder.of(turn) for turn in turns]
    num_units = sum(len(request.shared_units) for request in planned)
    assert num_units * unit == pytest.approx(total_tokens(turns), rel=0.05)
    for turn, request in zip(turns, planned, strict=True):
        assert request.tokens_at(len(request.shared_units)) == turn.ends[-1]
        ends = [segment.end for segment in request.segments]
        assert ends == sorted(set(ends)) and ends[-1] == len(request.shared_units)
