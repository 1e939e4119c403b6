"""`kill -9` of the gateway; scripts/long_tests kills does it 50 times under 50 streams."""

from pathlib import Path

import pytest

from tests.e2e.kills import run_kills
from tests.faults.sizes import number, told
from tests.postgres import new_database


@pytest.mark.parametrize(
    "backend, database, kills, streams, max_tokens",
    [
        ("synthetic", "sqlite", number(1, 50), number(20, 50), 60),
        pytest.param(
            *("synthetic", "postgres", number(1, 50), number(10, 50), 60),
            marks=[pytest.mark.slow, pytest.mark.postgres],
        ),
        pytest.param("native", "sqlite", 1, 3, 20, marks=pytest.mark.slow),
    ],
)
def test_a_killed_gateway_loses_doubles_and_leaks_nothing(
    request: pytest.FixtureRequest,
    tmp_path: Path,
    backend: str,
    database: str,
    kills: int,
    streams: int,
    max_tokens: int,
) -> None:
    is_postgres = database == "postgres"
    url = new_database(request.getfixturevalue("postgres"), "kills") if is_postgres else ""
    told_by = {"backend": backend, "database_url": url, "max_tokens": max_tokens}
    report = run_kills(tmp_path, kills=kills, streams=streams, **told_by)
    told("kills of the gateway", **vars(report))
    assert not report.lost and not report.wrong and not report.duplicates
    assert report.left_open == 0 and report.leaked == 0
    assert report.ledger == report.engine and report.ledger["output_tokens"] > 0
    assert report.is_exact, report
    assert sum(report.interrupted) > 0 and report.completed > 0


def test_turns_whose_record_was_being_written_are_not_lost(tmp_path: Path) -> None:
    """A slow disk, so that kills come before records are on disk: no engine has those turns."""
    report = run_kills(tmp_path, kills=number(1, 3), streams=30, disk_seconds=0.25)
    assert report.is_exact, report
    assert report.outcomes["gateway_killed"] == sum(report.interrupted) > 0 and report.completed > 0
