"""The look-back window and who pays for what, without a cache."""

from dataclasses import dataclass

from engine.cache.lookup import Mark, Segment, bill, eligible, longest_hit, window
from engine.protocol import Breakpoint


@dataclass
class Stored:
    tokens: int


def texts(count: int) -> list[Segment]:
    return [Segment("text", 10 * (index + 1), 0) for index in range(count)]


def test_a_window_is_twenty_positions_its_own_included() -> None:
    assert list(window(texts(40), 30)) == list(range(30, 10, -1))


def test_a_run_of_tool_results_in_one_turn_is_one_position() -> None:
    segments = texts(10) + [Segment("tool_result", 101 + i, 1) for i in range(50)] + texts(1)
    seen = list(window(segments, 60))
    assert seen[:52] == [60, *range(59, 9, -1), 9]
    assert len(seen) == 61


def test_runs_of_two_turns_or_two_kinds_are_two_positions() -> None:
    uses = [Segment("tool_use", 1, 0), Segment("tool_use", 2, 0), Segment("tool_use", 3, 1)]
    mixed = [Segment("tool_result", 4, 1), Segment("text", 5, 1)]
    segments = texts(30) + uses + mixed
    assert list(window(segments, 34)) == list(range(34, 13, -1))


def test_breakpoints_without_boundary_or_below_the_minimum_take_no_part() -> None:
    segments = [Segment("text", 9), Segment("text", None), Segment("text", 10)]
    points = [Breakpoint(2, "1h"), Breakpoint(1), Breakpoint(0)]
    assert eligible(segments, points, 10) == [Mark(2, 10, "1h")]


def test_each_breakpoint_stops_at_its_first_hit_and_the_longest_wins() -> None:
    stored = {20: Stored(20), 50: Stored(50), 80: Stored(80)}
    marks = [Mark(3, 40, "5m"), Mark(6, 70, "5m")]
    assert longest_hit(texts(10), marks, stored.get) is stored[50]
    assert longest_hit(texts(10), marks[:1], stored.get) is stored[20]


def test_a_bill_is_read_then_one_hour_then_five_minutes_then_input() -> None:
    marks = [Mark(0, 100, "1h"), Mark(1, 250, "1h"), Mark(2, 400, "5m")]
    usage = bill(marks, 1000, read=100, reused=112)
    assert usage.cache_read_tokens == 100
    assert usage.cache_write_1h_tokens == 150
    assert usage.cache_write_5m_tokens == 150
    assert usage.input_tokens == 600
    assert (usage.automatic_tokens, usage.computed_tokens) == (12, 888)
    assert usage.prompt_tokens == 1000


def test_without_breakpoints_everything_is_input() -> None:
    usage = bill([], 1000, read=0, reused=0)
    assert (usage.input_tokens, usage.prompt_tokens) == (1000, 1000)
