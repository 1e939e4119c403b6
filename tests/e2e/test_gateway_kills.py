"""`kill -9` of the gateway; scripts/long_tests kills does it 50 times on both databases."""

from pathlib import Path

import pytest

from tests.e2e.kills import run_kills


@pytest.mark.parametrize(
    "backend, kills, streams, max_tokens",
    [("synthetic", 2, 20, 60), pytest.param("native", 1, 3, 20, marks=pytest.mark.slow)],
)
def test_a_killed_gateway_loses_doubles_and_leaks_nothing(
    tmp_path: Path, backend: str, kills: int, streams: int, max_tokens: int
) -> None:
    report = run_kills(
        tmp_path, kills=kills, streams=streams, backend=backend, max_tokens=max_tokens
    )
    assert not report.lost and not report.wrong and not report.duplicates
    assert report.left_open == 0 and report.leaked == 0
    assert report.ledger == report.engine and report.ledger["output_tokens"] > 0
    assert report.is_exact, report
    assert sum(report.interrupted) > 0 and report.seen_final > 0


def test_turns_whose_record_was_being_written_are_not_lost(tmp_path: Path) -> None:
    """A slow disk, so that kills come before records are on disk: no engine has those turns."""
    report = run_kills(tmp_path, kills=3, streams=30, disk_seconds=0.25)
    assert report.is_exact, report
    assert report.killed_rows == sum(report.interrupted) > 0 and report.seen_final > 0
