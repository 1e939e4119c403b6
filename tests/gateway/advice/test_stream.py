"""What is advised for a stream of turns, in numbers that can be added up by hand."""

import pytest

from engine.protocol import Message, Prompt, TextPart, Ttl
from gateway.advice.cache import Cache
from gateway.advice.stream import advise_stream
from tests.gateway.advice.shapes import Sent, turns_of

SYSTEM = "rule " * 2000
MINUTE = 60_000


def prompt_of(number: int) -> Prompt:
    return Prompt([Message("user", [TextPart(f"question {number}")])], system=[TextPart(SYSTEM)])


def sent(count: int, gap_ms: int, marks: tuple[tuple[int, Ttl], ...] = ()) -> list[Sent]:
    return [Sent(n * gap_ms, prompt_of(n), marks) for n in range(count)]


def test_unmarked_requests_a_minute_apart_want_five_minutes() -> None:
    turns = turns_of(sent(10, MINUTE))
    advice = advise_stream(turns, 1024)
    size = turns[0].tokens[0]
    assert advice.verdict == "mark"
    assert [(m.place, m.ttl) for m in advice.markers] == [("system", "5m")]
    assert advice.saves.multiples == round(size * (10 - 1.25 - 9 * 0.1), 1)
    assert advice.saves.nano == size * (10_000 - 1250 - 900)
    assert advice.saves.tokens == 9 * size
    assert advice.saves.prefill_seconds == round(9 * size / 10_000, 3)
    assert advice.policy is not None
    assert (advice.policy.auto_cache, advice.policy.auto_cache_ttl) == ("prefix", "5m")


@pytest.mark.parametrize(
    ("minutes", "marks", "least", "verdict", "ttls", "kinds"),
    [
        (10, (), 1024, "mark", ["1h"], []),
        (120, (), 1024, "leave", [], None),
        # Never read.
        (120, ((0, "1h"),), 1024, "unmark", [], ["changing_end"]),
        (1, ((0, "5m"),), 1024, "leave", [], None),
        (1, ((0, "5m"),), 100_000, "leave", [], ["too_short"]),
    ],
)
def test_what_is_advised_depends_on_gaps_and_markers(
    minutes: int,
    marks: tuple[tuple[int, Ttl], ...],
    least: int,
    verdict: str,
    ttls: list[Ttl],
    kinds: list[str] | None,
) -> None:
    turns = turns_of(sent(10, minutes * MINUTE, marks))
    advice = advise_stream(turns, least)
    assert (advice.verdict, [marker.ttl for marker in advice.markers]) == (verdict, ttls)
    assert kinds is None or [finding.kind for finding in advice.findings] == kinds
    if verdict != "mark":
        saved = turns[0].tokens[0] * 10 if verdict == "unmark" else 0
        assert advice.saves.multiples == saved


def test_a_policy_and_a_price_are_not_always_known() -> None:
    advice = advise_stream(turns_of(sent(10, MINUTE, ((0, "5m"),))), 1024)
    assert advice.policy is None and advice.next_best is not None
    advice = advise_stream(turns_of(sent(10, MINUTE), dialect="anthropic"), 1024)
    assert advice.markers and advice.policy is None, "that dialect has markers"
    advice = advise_stream(turns_of(sent(10, MINUTE), rates=None), 1024)
    assert advice.verdict == "mark"
    assert advice.saves.nano is None and advice.saves.multiples > 0


def test_a_prewarm_pays_where_many_begin_at_once() -> None:
    at_once = [Sent(0, prompt_of(n), ((0, "5m"),)) for n in range(20)]
    advice = advise_stream(turns_of(at_once, begins_after_ms=2000), 1024)
    assert advice.prewarm.pays
    size = turns_of(at_once)[0].tokens[0]
    assert advice.prewarm.num_races == 19
    # Unmarked they cost 20 times the prefix; with a request ahead one write and 20 reads.
    assert advice.prewarm.saves.multiples == round(size * (20 - 1.25 - 20 * 0.1), 1)
    apart = advise_stream(turns_of(sent(20, MINUTE, ((0, "5m"),)), begins_after_ms=2000), 1024)
    assert not apart.prewarm.pays and apart.prewarm.num_races == 0


def test_a_growing_conversation_is_marked_along_its_turns() -> None:
    messages: list[Message] = []
    turns = []
    for number in range(12):
        messages = [*messages, Message("user", [TextPart(f"question {number} " * 100)])]
        turns.append(Sent(number * MINUTE, Prompt(list(messages), system=[TextPart(SYSTEM)])))
        messages = [*messages, Message("assistant", [TextPart(f"answer {number} " * 100)])]
    observations = turns_of(turns)
    advice = advise_stream(observations, 1024)
    assert advice.verdict == "mark" and advice.policy is not None
    assert advice.policy.auto_cache == "conversation"
    best = next(outcome for outcome in advice.outcomes if outcome.name == "conversation_5m")
    cache = Cache(1024)
    for turn in observations:
        answered: list[int] = [turn.answer] * (turn.answer > 0)
        cache.take(turn, [(place, "5m") for place in (0, *answered, len(turn.tokens) - 1)])
    assert best.multiples == round(cache.sums.multiples, 1)
