"""The data directory of `scripts/run` has one owner at a time, and nobody else reads it."""

from pathlib import Path

import pytest

from scripts.runner.data import Running, owning, prepare_data, read_running
from scripts.stack import StartError

RUNNING = Running(pid=1, gateway="http://127.0.0.1:8080", dashboard=None)


def test_a_directory_that_was_there_is_its_owners_only(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o755)
    assert prepare_data(data).is_dir()
    assert data.stat().st_mode & 0o777 == 0o700


def test_a_second_run_is_refused_before_it_touches_the_logs_of_the_first(tmp_path: Path) -> None:
    log = prepare_data(tmp_path) / "migrate.log"
    with owning(tmp_path, RUNNING):
        log.write_text("the first one's")
        with (
            pytest.raises(StartError, match=r"used by another.*127.0.0.1:8080.*--port"),
            owning(tmp_path, RUNNING),
        ):
            raise AssertionError
        assert log.read_text() == "the first one's"
        assert read_running(tmp_path) == RUNNING
    assert read_running(tmp_path) is None
    with owning(tmp_path, RUNNING):
        pass
