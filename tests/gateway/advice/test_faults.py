"""Planted faults are named at their block, and sound traffic raises no alarm."""

import pytest

from tests.gateway.advice.bodies_faulty import FAULTY_BODIES
from tests.gateway.advice.bodies_sound import SOUND_BODIES
from tests.gateway.advice.faulty import FAULTY
from tests.gateway.advice.simulated import faults_of, is_named, shown, sound_faults
from tests.gateway.advice.sound import SOUND

SEEDS = range(1000, 1004)


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
