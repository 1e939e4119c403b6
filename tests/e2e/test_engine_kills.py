"""`kill -9` of an engine under load; scripts/long_tests engine-kills does it 50 times."""

from pathlib import Path

from tests.e2e.engine_kills import run_engine_kills


def test_no_client_hears_of_a_killed_engine_before_its_first_byte(tmp_path: Path) -> None:
    report = run_engine_kills(tmp_path, kills=2, clients=16)
    assert not report.problems, report
    assert sum(report.interrupted) > 0 and report.completed > report.kills
    assert report.asked == report.completed + report.broken
