"""Which log-probabilities go out with which text."""

from engine.protocol import TextDelta, ThinkingDelta, ToolUseStart
from engine.schedule.output import LogProbs, Spelled

END = 9


def spelled(token_id: int) -> Spelled:
    return Spelled(f"t{token_id}".encode(), is_silent=token_id == END)


def told(deltas: object) -> list[list[int]]:
    assert isinstance(deltas, list)
    return [[one.drawn.token_id for one in getattr(delta, "logprobs", [])] for delta in deltas]


def test_a_text_that_was_held_back_has_those_of_all_its_tokens() -> None:
    probs = LogProbs(0, spelled)
    assert told(probs.told(1, [], is_thought=False)) == []
    assert told(probs.told(2, [TextDelta("ab")], is_thought=False)) == [[1, 2]]
    probs.told(3, [], is_thought=False)
    assert told(probs.closed([TextDelta("c")])) == [[3]]


def test_a_call_and_its_marks_have_none() -> None:
    probs = LogProbs(0, spelled)
    probs.told(1, [], is_thought=False)
    deltas = [TextDelta("x"), ToolUseStart("id", "look")]
    assert told(probs.told(2, deltas, is_thought=False)) == [[1, 2], []]
    assert told(probs.told(3, [TextDelta("y")], is_thought=False)) == [[3]]
    probs.told(4, [], is_thought=False)
    probs.told(5, [ToolUseStart("id", "look")], is_thought=False)
    assert told(probs.told(6, [TextDelta("z")], is_thought=False)) == [[6]]


def test_thinking_has_none_and_the_end_of_a_turn_is_no_text() -> None:
    probs = LogProbs(0, spelled)
    assert told(probs.told(1, [ThinkingDelta("hm")], is_thought=True)) == [[]]
    probs.told(2, [], is_thought=True)
    probs.told(3, [], is_thought=False)
    assert told(probs.told(END, [TextDelta("a")], is_thought=False)) == [[3]]


def test_the_likeliest_are_told_with_the_token() -> None:
    probs = LogProbs(2, spelled)
    probs.probs.drawn, probs.probs.top = -0.5, [(7, -0.25), (8, -0.5)]
    [delta] = probs.told(8, [TextDelta("h")], is_thought=False)
    assert isinstance(delta, TextDelta)
    [one] = delta.logprobs
    assert (one.drawn.token, one.drawn.logprob) == (b"t8", -0.5)
    assert [(likely.token, likely.logprob) for likely in one.top] == [(b"t7", -0.25), (b"t8", -0.5)]
