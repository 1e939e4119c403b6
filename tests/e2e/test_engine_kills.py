"""`kill -9` of an engine under load; scripts/long_tests engine-kills: 50 times, and hangs."""

from pathlib import Path

from tests.e2e.engine_kills import run_engine_kills
from tests.faults.sizes import number, told


def test_no_client_hears_of_a_killed_engine_before_its_first_byte(tmp_path: Path) -> None:
    kills, hangs, clients = number((2, 0, 16), (50, 10, 32))
    report = run_engine_kills(tmp_path, kills=kills, hangs=hangs, clients=clients)
    told("kills of an engine", **vars(report))
    assert not report.problems, report
    assert sum(report.interrupted) > 0 and report.completed > report.kills
    assert report.asked == report.completed + report.broken
