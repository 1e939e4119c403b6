"""A real engine with a store, killed and ended; `tests.faults.store` does it longer."""

from argparse import Namespace
from pathlib import Path

from tests.faults.store import Trial, plain_engine


def test_stored_leases_outlive_a_kill_and_a_planned_end(tmp_path: Path) -> None:
    options = Namespace(
        kills=1, planned=1, turns=3, words=60, long_words=0, threads=1, seed=1, clients=2
    )
    with plain_engine(tmp_path, options.threads) as plain:
        report = Trial(tmp_path, options).run(plain)
    assert report.restarts == 2 and report.leases_due > 0 and report.answers > 0
    assert report.lost == report.unread == report.wrong == 0
    assert report.broken_streams > 0, "nobody was being answered when it ended"
    assert report.read_tokens > 0, "nothing of what the disk kept was read"
