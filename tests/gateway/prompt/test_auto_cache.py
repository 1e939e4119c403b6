"""Automatic caching: which breakpoints a policy makes."""

import pytest

from engine.protocol import (
    Breakpoint,
    Message,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from gateway.admin.structs.fleet import AutoCacheMode
from gateway.base.grants import AutoCache
from gateway.prompt.breakpoints import Slot, add_automatic

PROMPT = Prompt(
    [
        Message("user", [TextPart("a"), TextPart("b")]),
        Message("assistant", [ThinkingPart("t"), ToolUsePart("c", "look", {})]),
        Message("user", [ToolResultPart("c", "r"), TextPart("d")]),
    ],
    [Tool("look", {})],
    [TextPart("s")],
)
SLOTS = [Slot(path=str(n), can_carry=n != 4) for n in range(8)]


def placed(
    mode: AutoCacheMode, given: list[Breakpoint] | None = None, prompt: Prompt = PROMPT
) -> list[tuple[int, str]]:
    slots = SLOTS[: prompt.num_segments]
    found = add_automatic(prompt, slots, given or [], AutoCache(mode))
    return [(point.segment, point.ttl) for point in found]


def test_each_mode_marks_what_it_says() -> None:
    assert placed("off") == []
    assert placed("prefix") == [(1, "5m")]
    # Behind the system prompt, the prompt of the request before, and the last turn.
    assert placed("conversation") == [(1, "5m"), (3, "5m"), (7, "5m")]


def test_places_that_fall_together_are_one() -> None:
    first = Prompt([Message("user", [TextPart("a")])])
    assert placed("conversation", prompt=first) == [(0, "5m")]
    assert placed("prefix", prompt=first) == []
    answered = Prompt([Message("assistant", [TextPart("x")]), Message("user", [TextPart("a")])])
    assert placed("conversation", prompt=answered) == [(1, "5m")]


def test_a_place_that_carries_no_marker_is_passed_over() -> None:
    thought = Prompt([*PROMPT.messages[:1], Message("assistant", [ThinkingPart("t")])], [], [])
    slots = [Slot(path="a"), Slot(path="b"), Slot(path="t", can_carry=False)]
    found = add_automatic(thought, slots, [], AutoCache())
    assert [point.segment for point in found] == [1]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ([Breakpoint(2, "1h")], [(2, "1h"), (7, "5m")]),
        ([Breakpoint(7, "1h")], [(7, "1h")]),
        ([Breakpoint(n, "1h") for n in (0, 1, 2, 3)], [(n, "1h") for n in (0, 1, 2, 3)]),
    ],
)
def test_beside_the_clients_only_the_last_turn_is_marked(
    given: list[Breakpoint], expected: list[tuple[int, str]]
) -> None:
    assert placed("conversation", given) == expected


def test_there_are_never_more_than_four_nor_a_longer_ttl_behind_a_shorter() -> None:
    for mask in range(1 << 8):
        given = [Breakpoint(n, "1h" if n < 4 else "5m") for n in range(8) if mask >> n & 1][:4]
        for ttl in ("5m", "1h"):
            found = add_automatic(PROMPT, SLOTS, given, AutoCache("conversation", ttl))
            assert len(found) <= 4
            assert [p.segment for p in found] == sorted({p.segment for p in found})
            ttls = [p.ttl for p in found]
            assert ttls == sorted(ttls), "1h sorts before 5m"
            assert set(given) <= set(found)
