"""What the engine keeps of the gateways' records has a bound in bytes."""

import pytest

from engine.protocol import FinalCounts
from engine.schedule import accounting
from engine.schedule.accounting import Totals


def ended(number: int) -> FinalCounts:
    return FinalCounts(request_id=f"r{number}", epoch="e", reason="stop")


def kept(of: Totals, number: int) -> list[str]:
    return [one.request_id for one in of.records(f"r{each}" for each in range(number))]


def test_beyond_the_bound_the_oldest_records_go_and_their_counts_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounting, "MAX_RECORDS_BYTES", 30)
    of = Totals()
    for number in range(5):
        of.ended(ended(number), "ü" * 5)
    assert kept(of, 5) == ["r2", "r3", "r4"] and of.num_unacknowledged == 5
    of.acknowledge(["r2", "r3"])
    of.acknowledge(["r3"])
    for number in (5, 6):
        of.ended(ended(number), "x" * 10)
    assert kept(of, 7) == ["r4", "r5", "r6"]


def test_counts_that_are_forgotten_take_their_record_along(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(accounting, "MAX_UNACKNOWLEDGED", 2)
    of = Totals()
    for number in range(4):
        of.ended(ended(number), "x")
    assert kept(of, 4) == ["r2", "r3"] and of.num_forgotten == 2
