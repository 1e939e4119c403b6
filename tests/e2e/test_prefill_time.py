"""The prefill time that reads avoided is what a cold replay of the same prompts takes."""

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from gateway.routing.epochs import RECORD_SECONDS
from scripts.bench.load import marked
from tests.e2e.fleet import Gateway, running_fleet

# A step takes a busy machine a few milliseconds more: little beside these.
TOKEN_US = 200
SETTINGS = {"ENGINE_MIN_CACHE_TOKENS": "64", "ENGINE_SYNTHETIC_PREFILL_US": str(TOKEN_US)}
NUM_READS = 10
NUM_REPLAYS = 3
MAX_ROUNDS = 12


def prompt(first: str, length: int) -> list[dict[str, Any]]:
    """Of about so many words. Nothing behind another first word is shared."""
    return marked(f"{first}. " + "A rule that holds. " * (length // 4), "1h")


def turn(gateway: Gateway, system: list[dict[str, Any]], question: str) -> dict[str, Any]:
    return gateway.recorded(gateway.answer(system, question, max_tokens=2)["id"])


def quickest(replays: Sequence[dict[str, Any]]) -> float:
    """The prefill of the quickest replay, in seconds. Other work on the machine only adds to it."""
    return min(float(row["prefill_seconds"]) for row in replays)


def measure(gateway: Gateway, query: str, lengths: Sequence[int]) -> None:
    """Give the engine prompts to compute until the time of its tokens is known.

    On a busy machine steps of one size take very different times, and the gateway rightly says
    that it does not know a token's until it has seen more of them.
    """
    # What the last steps took is in the ledger soon.
    time.sleep(5 * RECORD_SECONDS)
    for number in range(MAX_ROUNDS):
        if not gateway.get(f"savings?{query}")["unmeasured_tokens"]:
            return
        for length in lengths:
            turn(gateway, prompt(f"Round {number}, {length}", length), "Now?")
        time.sleep(5 * RECORD_SECONDS)


def avoided(gateway: Gateway, query: str = "") -> float:
    savings = gateway.get(f"savings?{query}")
    assert savings["unmeasured_tokens"] == 0
    assert savings["gpu_hours_avoided"] is None, "no engine here computes on a GPU"
    return float(savings["prefill_seconds_avoided"] or 0.0)


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("backend", "lengths", "tolerance"),
    [
        pytest.param("synthetic", (1000, 2000, 4000), 0.1, id="synthetic"),
        pytest.param("native", (300, 600, 900), 0.25, id="native", marks=pytest.mark.slow),
    ],
)
def test_the_time_avoided_is_that_of_a_cold_replay(
    tmp_path: Path, backend: str, lengths: tuple[int, ...], tolerance: float
) -> None:
    with running_fleet(tmp_path, settings=SETTINGS, backend=backend) as fleet:
        gateway = fleet.gateway
        # Short turns beside long ones, and several at a time: neither is the time of a token.
        first_turns = [
            turn(gateway, prompt(f"One, {length}", length), "Why?") for length in lengths
        ]
        questions = [
            (length, f"And {number}?") for length in lengths for number in range(NUM_READS)
        ]
        with ThreadPoolExecutor(3) as pool:
            reads = list(
                pool.map(
                    lambda question: turn(
                        gateway, prompt(f"One, {question[0]}", question[0]), question[1]
                    ),
                    questions,
                )
            )
        read_tokens = sum(row["cache_read_tokens"] for row in reads)
        assert all(row["cache_read_tokens"] > 0 for row in reads)
        middle_ms = reads[len(reads) // 2]["opened_ms"]

        # The same prompts, one at a time: what a cold one takes more than one that reads.
        until_ms = 0
        more_seconds = 0.0
        num_spared_tokens = 0
        for length in lengths:
            warm = [
                turn(gateway, prompt(f"One, {length}", length), "Now?") for _ in range(NUM_REPLAYS)
            ]
            cold = [
                turn(gateway, prompt(f"Cold {replay}, {length}", length), "Now?")
                for replay in range(NUM_REPLAYS)
            ]
            assert not any(row["cache_read_tokens"] for row in cold)
            more_seconds += quickest(cold) - quickest(warm)
            num_spared_tokens += warm[0]["cache_read_tokens"]
            until_ms = until_ms or warm[0]["opened_ms"]
        per_token = more_seconds / num_spared_tokens
        first_ms = first_turns[0]["opened_ms"]
        measure(gateway, f"since_ms={first_ms}&until_ms={until_ms}", lengths)
        whole = avoided(gateway, f"since_ms={first_ms}&until_ms={until_ms}")
        assert whole == pytest.approx(read_tokens * per_token, rel=tolerance)
        if backend == "synthetic":
            assert whole == pytest.approx(read_tokens * TOKEN_US / 1e6, rel=tolerance)
        halves = [
            avoided(gateway, f"since_ms={first_ms}&until_ms={middle_ms}"),
            avoided(gateway, f"since_ms={middle_ms}&until_ms={until_ms}"),
        ]
        assert sum(halves) == pytest.approx(whole)
        engine = avoided(gateway, f"since_ms={first_ms}&until_ms={until_ms}&engine=engine-0")
        assert engine == pytest.approx(whole)
