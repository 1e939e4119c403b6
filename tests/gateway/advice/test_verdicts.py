"""One verdict for each group of requests: it saves most, and nothing contradicts it."""

import dataclasses
import random
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.protocol import Prompt, TextPart, Ttl
from gateway.advice.duplicates import find_groups, near_duplicate
from gateway.advice.observation import Observation
from gateway.advice.stream import advise_stream
from gateway.advice.summary import MIN_TURNS, summary_lines
from gateway.advice.verdicts import gain_over, reconciled, total
from gateway.structs.advice import Amount, NearDuplicate, StreamAdvice
from tests.gateway.advice.shapes import (
    MINUTE_MS,
    RATES,
    START_MS,
    Author,
    Sent,
    random_prompt,
    turns_of,
    user,
)

MIN_TOKENS = 64
RULES = "a rule to follow\n" * 400
NOTHING = Amount(tokens=0, multiples=0.0, nano=0)


def advised(
    turns: Sequence[Observation],
) -> tuple[list[StreamAdvice], list[NearDuplicate]]:
    """As the admin API puts it together: streams by key, near-duplicates over all keys."""
    streams = [
        advise_stream([turn for turn in turns if turn.key == key], MIN_TOKENS)
        for key in sorted({turn.key for turn in turns})
    ]
    groups = find_groups(turns, MIN_TOKENS)
    near = [near_duplicate(group, MIN_TOKENS, {}) for group in groups]
    return reconciled(streams, [group for group in near if group is not None])


def begun_with_an_id(marks: tuple[tuple[int, Ttl], ...], key: str = "k") -> list[Observation]:
    requests = [
        Sent(
            START_MS + number * MINUTE_MS,
            Prompt(
                [user(f"question {number}")], system=[TextPart(f"run {number * 7919}\n{RULES}")]
            ),
            marks,
        )
        for number in range(12)
    ]
    return [dataclasses.replace(turn, key=key) for turn in turns_of(requests)]


def holds(streams: Sequence[StreamAdvice], near: Sequence[NearDuplicate]) -> None:
    """What must be so whatever the traffic was."""
    for stream in streams:
        worths = [finding for finding in stream.findings if gain_over(finding, NOTHING) > 0]
        assert all(gain_over(finding, stream.saves) <= 0 for finding in worths)
        if stream.verdict == "leave":
            assert not worths and not stream.prewarm.pays
            assert (stream.saves.tokens, stream.saves.multiples) == (0, 0)
        if stream.verdict == "unmark":
            assert {finding.kind for finding in stream.findings} <= {"changing_end"}
            assert not stream.prewarm.pays and not stream.markers
        if stream.fix is not None:
            assert stream.verdict == "fix" and stream.findings[0] == stream.fix
            assert not stream.markers and stream.policy is None
        if stream.verdict != "leave":
            week = msgspec.structs.replace(stream, num_turns=MIN_TURNS)
            lines, _ = summary_lines([week], [], {}, {})
            worth = stream.saves.multiples, stream.saves.nano
            assert worth in [(line.multiples, line.nano) for line in lines], "as its page says"
    for group in near:
        having = [stream for stream in streams if _has(stream, group)]
        assert having and all(stream.verdict not in ("leave", "unmark") for stream in having)
    if all(stream.verdict == "leave" for stream in streams):
        assert not near, "nothing would be cheaper, and something would"


def _has(stream: StreamAdvice, near: NearDuplicate) -> bool:
    part = near.by_key.get(stream.key)
    return (stream.workspace, stream.model) == (near.workspace, near.model) and (
        part is not None and part.multiples > 0
    )


def test_a_fix_that_saves_more_than_no_markers_is_the_verdict() -> None:
    turns = begun_with_an_id(((0, "5m"),))
    unmarked = next(
        outcome for outcome in advise_stream(turns, MIN_TOKENS).outcomes if outcome.name == "none"
    )
    assert unmarked.saves is not None and unmarked.saves.multiples > 0, "it would have paid"
    streams, near = advised(turns)
    (stream,) = streams
    assert stream.verdict == "fix" and "Mark nothing" not in stream.text
    assert stream.fix is not None and stream.fix.path == "system.0"
    assert stream.saves.multiples > unmarked.saves.multiples
    holds(streams, near)


def test_prefixes_that_are_nearly_the_same_are_not_below_a_leave() -> None:
    """Each key sends one version of the prefix: no key has a fault of its own."""
    turns: list[Observation] = []
    for number in range(6):
        system = [TextPart(f"run {number * 7919}\n{RULES}")]
        requests = [
            Sent(START_MS + (number + 6 * again) * MINUTE_MS, Prompt([user("q")], system=system))
            for again in range(1)
        ]
        turns += [
            dataclasses.replace(turn, key=f"k{number}", id=f"msg_{number}")
            for turn in turns_of(requests)
        ]
    assert {advise_stream([turn], MIN_TOKENS).verdict for turn in turns} == {"leave"}
    streams, near = advised(turns)
    assert near, "one name would have saved"
    assert any(stream.verdict == "fix" and stream.is_near for stream in streams)
    saves = total([stream.saves for stream in streams])
    assert 0 < saves.multiples
    holds(streams, near)


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num=st.integers(1, 24),
    keys=st.integers(1, 3),
    gap=st.sampled_from([0, 1_000, MINUTE_MS, 7 * MINUTE_MS, 90 * MINUTE_MS]),
    begins=st.sampled_from([0, 2_000]),
    is_priced=st.booleans(),
    lead=st.sampled_from(["none", "id", "date", "version"]),
)
def test_whatever_the_traffic_nothing_contradicts_the_verdict(
    seed: int, num: int, keys: int, gap: int, begins: int, is_priced: bool, lead: str
) -> None:
    chance = random.Random(seed)
    text = Author(chance).text(30)
    requests = []
    for number in range(num):
        prompt = random_prompt(chance)
        if lead != "none":
            first = {"id": f"req_{number:08}a", "date": f"2026-11-{1 + number % 28:02}"}
            begun = f"{first.get(lead, f'v{chance.randint(0, 2)}')}\n{text}"
            prompt = msgspec.structs.replace(prompt, system=[TextPart(begun), *prompt.system])
        count = len(prompt.tools) + len(prompt.system)
        ttl: Ttl = chance.choice(["5m", "1h"])
        marks = ((count - 1, ttl),) if count and chance.random() < 0.6 else ()
        requests.append(Sent(START_MS + number * gap, prompt, marks))
    rates = RATES if is_priced else None
    turns = [
        dataclasses.replace(turn, key=f"k{chance.randrange(keys)}")
        for turn in turns_of(requests, rates=rates, begins_after_ms=begins)
    ]
    streams, near = advised(turns)
    holds(streams, near)


@pytest.mark.parametrize("nano", [None, 5])
def test_a_sum_of_amounts_is_priced_where_all_are(nano: int | None) -> None:
    amount = Amount(tokens=1, multiples=0.5, nano=4, prefill_seconds=0.5)
    whole = total([amount, Amount(tokens=2, multiples=1.0, nano=nano)])
    assert whole == Amount(tokens=3, multiples=1.5, nano=nano and 9)
