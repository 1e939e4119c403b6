"""Random conversations against the reference model: the counters must be equal, to the token."""

import os
import random

import pytest

from engine.protocol import CountReply, Message, Prompt, TextPart
from tests.conformance.engines import Engine
from tests.conformance.oracle import Cache
from tests.fuzz.talks import Marks, Talk, choose_marks, resolved

SEED = int(os.environ.get("CONFORMANCE_SEED", "20260"))
SEQUENCES = int(os.environ.get("CONFORMANCE_SEQUENCES", "30"))
REQUESTS = 8
MINIMUM = 32
WAITS = (0, 0, 1, 120, 299, 300, 301, 1800, 3599, 3600)


def run_sequence(engine: Engine, seed: int, longest: int) -> list[str]:
    """Play one conversation on both; every difference as a line."""
    rng = random.Random(seed)
    model = Cache(min_cache_tokens=MINIMUM)
    has_tools = engine.has("tools") and engine.description.prefix_order == "tools_first"
    talk = Talk(rng, f"seed {seed}", longest, has_tools)
    talk.begin()
    scopes = [engine.scope(), engine.scope()]
    now = 0.0
    differences = []
    for number in range(REQUESTS):
        rng.choice([talk.grow, talk.grow, talk.grow, talk.edit, talk.cut, lambda: None])()
        marks = resolved(talk, choose_marks(rng, talk))
        wait = rng.choice(WAITS)
        scope = rng.choice([scopes[0], *scopes])
        now += wait
        engine.advance(wait)
        conversation = talk.prompt()
        counted = engine.count(conversation)
        ends = engine.ends(conversation)
        assert None not in counted.segment_tokens, "this model leaves no boundary here"
        tail = counted.input_tokens - ends[-1]
        want = model.run(talk.blocks(ends, Marks(marks)), t=now, g=tail, scope=scope)
        usage = engine.ask(conversation, scope, *marks.items(), minimum=MINIMUM).usage
        counts = {
            "inp": usage.input_tokens,
            "read": usage.cache_read_tokens,
            "w5": usage.cache_write_5m_tokens,
            "w1": usage.cache_write_1h_tokens,
        }
        if counts != want:
            differences.append(f"seed {seed} request {number}: {counts} instead of {want}")
    for scope in scopes:
        engine.drop(scope)
    return differences


def test_the_counters_are_the_reference_models(engine: Engine) -> None:
    if engine.description.granularity != 1:
        pytest.skip(f"declares granularity {engine.description.granularity}: the model's is 1")
    # An engine that computes takes its time: fewer and shorter sequences there.
    computes = engine.description.model != "synthetic"
    number, longest = (max(SEQUENCES // 20, 1), 30) if computes else (SEQUENCES, 200)
    print(f"CONFORMANCE_SEED={SEED}, {number} sequences of {REQUESTS}")
    differences = [line for i in range(number) for line in run_sequence(engine, SEED + i, longest)]
    assert not differences, differences[:10]


def test_synthetic_tokens_are_one_per_four_bytes_and_segment(engine: Engine) -> None:
    if engine.description.model != "synthetic":
        pytest.skip(f"declares backend {engine.description.backend}: no tokens by hand")
    conversation = Prompt(messages=[Message("user", [TextPart("12345"), TextPart("é€")])])
    assert engine.count(conversation) == CountReply(2 + 2 + 4, [2, 4])
