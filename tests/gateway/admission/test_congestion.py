"""The window of a workspace's unanswered turns, on a clock that the tests move."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Self

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.admission import congestion as module
from gateway.admission.congestion import (
    IDLE_SECONDS,
    MOST,
    NEIGHBOUR_SECONDS,
    CongestionWindows,
)
from gateway.admission.permit import Permit


class Turn(Permit):
    """One turn in its workspace's window. Its context is its time at engines."""

    def __init__(self, windows: CongestionWindows, workspace: str) -> None:
        ask: Any = SimpleNamespace(principal=SimpleNamespace(workspace=workspace))
        admission: Any = SimpleNamespace(queue=SimpleNamespace(windows=windows))
        super().__init__("turn", ask, admission, is_counted=True)
        windows.enter(workspace)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if not self.is_left:
            self.ended()


@dataclass
class Case:
    """Windows, their clock, and the turns that are at engines."""

    seconds: float = 0.0
    num_rooms: int = 0
    turns: list[Turn] = field(default_factory=list)
    windows: CongestionWindows = field(init=False)

    def __post_init__(self) -> None:
        self.windows = CongestionWindows(lambda: self.seconds, self._note_room)
        self.meet_neighbour()

    def _note_room(self) -> None:
        self.num_rooms += 1

    def meet_neighbour(self) -> None:
        """Another workspace has a turn at this moment."""
        Turn(self.windows, "neighbour").ended()

    def enter(self, number: int = 1, workspace: str = "w") -> list[Turn]:
        entered = [Turn(self.windows, workspace) for _ in range(number)]
        self.turns += entered
        return entered

    def abandon(self, number: int) -> None:
        """As many turns at once, which all are left."""
        for turn in self.enter(number):
            with turn:
                turn.left()
        for turn in self.turns:
            turn.ended()

    @property
    def window(self) -> int | None:
        return window_of(self.windows, "w")


def window_of(windows: CongestionWindows, workspace: str) -> int | None:
    """How many unanswered turns it may have at engines; None for any number."""
    account = windows._accounts.get(workspace)
    return None if account is None else account.window_at(windows._monotonic())


def test_each_turn_that_is_left_halves_the_window_down_to_one() -> None:
    case = Case()
    seen = []
    for turn in case.enter(40)[:7]:
        turn.left()
        seen.append(case.window)
    assert seen == [20, 10, 5, 2, 1, 1, 1]
    windows = CongestionWindows(lambda: 0.0, least=lambda: 7 // 2)
    for turn in [Turn(windows, "w") for _ in range(40)]:
        turn.left()
    assert window_of(windows, "w") == 3, "half of the engines, and no smaller"


def test_each_answered_turn_widens_the_window_by_one_until_there_is_none() -> None:
    case = Case()
    case.abandon(8)
    for expected in range(2, MOST):
        [turn] = case.enter()
        turn.answered()
        turn.left()
        assert case.window == expected, "a client may leave an answered turn"
    [turn] = case.enter()
    turn.answered()
    assert case.window is None and case.windows.num_bounded == 0


def test_idle_time_doubles_the_window_and_time_with_turns_does_not() -> None:
    case = Case()
    case.abandon(8)
    [turn] = case.enter()
    case.seconds += 100 * IDLE_SECONDS
    assert case.window == 1
    with turn:
        pass
    case.seconds += 2.5 * IDLE_SECONDS
    assert case.window == 4
    case.meet_neighbour()
    case.enter(4)
    assert case.window == 4 and not case.windows.is_open("w")
    for turn in case.turns:
        turn.ended()
    case.seconds += 9 * IDLE_SECONDS
    assert case.window is None


def test_a_window_binds_while_another_workspace_has_turns() -> None:
    case = Case()
    case.abandon(8)
    case.enter(1)
    assert not case.windows.is_open("w")
    case.seconds += NEIGHBOUR_SECONDS + 1
    assert case.window == 1 and case.windows.is_open("w"), "it is alone"
    for workspace in ("first", "second", "w"):
        case.enter(workspace=workspace)
    assert not case.windows.is_open("w")


@pytest.mark.parametrize(("every", "least", "most"), [(100, 100, 400), (10, 10, 40)])
def test_a_workspace_with_few_turns_that_are_left_keeps_a_wide_window(
    every: int, least: int, most: int
) -> None:
    """A fluid model says 2 * (1 - p) / p for a share p = 1 / every of turns that are left."""
    case = Case()
    case.abandon(8)
    seen = []
    turns: list[Turn] = []
    for number in range(20_000):
        while case.windows.is_open("w"):
            turns += [Turn(case.windows, "w")]
        turn = turns.pop(0)
        if number % every == 0:
            turn.left()
            turn.ended()
        else:
            turn.answered()
        seen.append(case.window or MOST)
    later = sorted(seen[10_000:])
    assert least <= later[len(later) // 2] <= most


def test_accounts_are_forgotten_when_their_windows_are_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "_MAX_WORKSPACES", 10)
    case = Case()
    for number in range(10):
        [turn] = case.enter(workspace=f"w{number}")
        turn.left()
        turn.ended()
    case.seconds += 12 * IDLE_SECONDS
    case.enter(workspace="new")
    assert list(case.windows._accounts) == ["new"]


STEPS = st.sampled_from(["enter", "answered", "left", "ended", "fail", "wait"])


@given(st.lists(st.tuples(STEPS, st.integers(0, 7), st.sampled_from("ab")), max_size=80))
def test_windows_count_exactly_what_is_at_engines(steps: list[tuple[str, int, str]]) -> None:
    """Whatever happens in whatever order, also twice."""
    case = Case()
    at_engines: dict[str, list[Turn]] = {"a": [], "b": []}
    left: set[int] = set()
    for step, number, workspace in steps:
        case.meet_neighbour()
        turns = at_engines[workspace]
        window = window_of(case.windows, workspace)
        assert window is None or 1 <= window < MOST
        assert case.windows.is_open(workspace) == (window is None or len(turns) < window)
        if step == "wait":
            case.seconds += number
        elif step == "enter":
            turns += case.enter(workspace=workspace)
        elif turns:
            turn = turns[number % len(turns)]
            if step == "fail":
                with turn:
                    pass
            else:
                getattr(turn, step)()
            left |= {id(turn)} if step == "left" else set()
            if step in ("answered", "ended") or (step == "fail" and id(turn) not in left):
                turns.remove(turn)
