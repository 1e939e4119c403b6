"""Planted faults are named at their block, and sound traffic raises no alarm."""

import random
from typing import Any

import pytest

from gateway.advice import pasted
from gateway.advice.faults import Fault, find_faults
from tests.gateway.advice.faulty import FAULTY, FAULTY_BODIES
from tests.gateway.advice.shapes import Author, Sent, turns_of
from tests.gateway.advice.sound import SOUND, SOUND_BODIES

SEEDS = range(1000, 1004)


def faults_in(requests: list[Any]) -> list[Fault]:
    """Of prompts, or of pasted requests a second apart."""
    if isinstance(requests[0], Sent):
        return find_faults(turns_of(requests, begins_after_ms=300))
    return find_faults(
        [
            pasted.observation_of(pasted.read(body), number, number * 1000, None)
            for number, body in enumerate(requests)
        ]
    )


def lines(faults: list[Fault]) -> list[str]:
    return [
        f"{fault.kind} at {fault.path} ({fault.turns} turns, {fault.tokens} tokens)"
        for fault in faults
    ]


@pytest.mark.parametrize("shape", [*FAULTY, *FAULTY_BODIES])
def test_a_planted_fault_is_named_at_its_block(shape: str) -> None:
    planted = (FAULTY | FAULTY_BODIES)[shape]
    section = planted.path.partition(".")[0]
    for seed in SEEDS:
        faults = faults_in(planted.make(Author(random.Random(f"{shape} {seed}"))))
        assert faults and all(
            fault.kind in planted.kinds
            and (fault.path == planted.path or planted.path == section == fault.section)
            for fault in faults
        ), (seed, planted, lines(faults))
        dearest = faults[0]
        assert dearest.tokens == sum(loss.tokens for loss in dearest.losses) > 0
        assert all(loss.turn != loss.earlier for loss in dearest.losses)


@pytest.mark.parametrize("shape", [*SOUND, *SOUND_BODIES])
def test_sound_traffic_raises_no_alarm(shape: str) -> None:
    for seed in SEEDS:
        requests = (SOUND | SOUND_BODIES)[shape](Author(random.Random(f"{shape} {seed}")))
        assert (seed, lines(faults_in(requests))) == (seed, [])
