"""Planted faults are named at their block, and sound traffic raises no alarm."""

import random

import pytest

from gateway.advice import pasted
from gateway.advice.faults import Fault, find_faults
from gateway.advice.observation import Observation
from tests.gateway.advice.bodies import Bodies
from tests.gateway.advice.bodies_faulty import FAULTY_BODIES
from tests.gateway.advice.bodies_sound import SOUND_BODIES
from tests.gateway.advice.faulty import FAULTY, Expected
from tests.gateway.advice.shapes import Author, observed
from tests.gateway.advice.sound import SOUND

SEEDS = range(1000, 1004)


def faults_of(name: str, seed: int) -> tuple[list[Fault], Expected]:
    """What the advisor finds in a shape with a planted fault, and what was planted."""
    author = Author(random.Random(f"{name} {seed}"))
    if name in FAULTY_BODIES:
        bodies, expected = FAULTY_BODIES[name](author)
        return find_faults(pasted_turns(bodies)), expected
    sent, expected = FAULTY[name](author)
    return find_faults(observed(sent)), expected


def sound_faults(name: str, seed: int) -> list[Fault]:
    author = Author(random.Random(f"{name} {seed}"))
    if name in SOUND_BODIES:
        return find_faults(pasted_turns(SOUND_BODIES[name](author)))
    return find_faults(observed(SOUND[name](author)))


def pasted_turns(bodies: Bodies) -> list[Observation]:
    """The turns of pasted requests, a second apart."""
    return [
        pasted.observation_of(pasted.read(body), number, number * 1000, None)
        for number, body in enumerate(bodies)
    ]


def is_named(found: list[Fault], expected: Expected) -> bool:
    """Whether the planted fault is the one that is found, at its block, and no other one is."""
    section = expected.path.partition(".")[0]
    return bool(found) and all(
        each.kind in expected.kinds
        and (each.path == expected.path or expected.path == section == each.section)
        for each in found
    )


def shown(found: list[Fault]) -> list[str]:
    return [
        f"{each.kind} at {each.path} ({each.turns} turns, {each.tokens} tokens)" for each in found
    ]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [*FAULTY, *FAULTY_BODIES])
def test_a_planted_fault_is_named_at_its_block(shape: str, seed: int) -> None:
    found, expected = faults_of(shape, seed)
    assert is_named(found, expected), (expected, shown(found))
    dearest = found[0]
    assert dearest.tokens == sum(loss.tokens for loss in dearest.losses) > 0
    assert all(loss.turn != loss.earlier for loss in dearest.losses)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("shape", [*SOUND, *SOUND_BODIES])
def test_sound_traffic_raises_no_alarm(shape: str, seed: int) -> None:
    assert shown(sound_faults(shape, seed)) == []
