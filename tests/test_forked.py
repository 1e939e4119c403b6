"""A forked server is the process that was asked for: its words, environment, log and end."""

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.stack import ROOT, python, serving_engine, start
from tests.forked import CAN_FORK, ForkingPopen

WAIT_SECONDS = 300
# Forks a server, tells its id, and lives on.
FORKS = """
import os, sys
from tests.forked import Source
source = Source.forked()
pid, _ = source.fork("http.server", ["--bind", "127.0.0.1", "0"], dict(os.environ), (2, 2))
print(pid, flush=True)
sys.stdin.read()
"""


def forked(*words: str, log: Path, **environment: str) -> subprocess.Popen[bytes]:
    process = start([*python("engine"), *words], environment, log)
    assert isinstance(process, ForkingPopen)
    assert process.is_forked
    return process


def test_its_words_and_settings_reach_it_and_its_end_is_told(tmp_path: Path) -> None:
    log = tmp_path / "log"
    process = forked("--backend", "synthetic", log=log, ENGINE_PORT="none")
    assert process.wait(WAIT_SECONDS) == 2
    assert process.poll() == 2
    lines = log.read_text().splitlines()
    assert {line.partition(":")[0] for line in lines} == {"ENGINE_PORT", "ENGINE_SECRET"}


def test_what_it_says_goes_where_ours_goes_now(capfd: pytest.CaptureFixture[str]) -> None:
    """The process that it is forked from was started while another test's output was captured."""
    process = start(python("engine"), {"ENGINE_PORT": "none"})
    assert isinstance(process, ForkingPopen)
    assert process.is_forked
    assert process.wait(WAIT_SECONDS) == 2
    captured = capfd.readouterr()
    assert "ENGINE_PORT" in captured.out + captured.err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 0), (signal.SIGKILL, -9)])
def test_a_signal_ends_it(number: signal.Signals, status: int, tmp_path: Path) -> None:
    with serving_engine("synthetic", log=tmp_path / "log") as engine:
        engine.wait()
        with pytest.raises(subprocess.TimeoutExpired):
            engine.process.wait(0.01)
        engine.process.send_signal(number)
        assert engine.process.wait(WAIT_SECONDS) == status
    ready = json.loads((tmp_path / "log").read_text().splitlines()[-1])
    assert ready["backend"] == "synthetic"


def test_a_server_with_a_setting_of_a_library_is_started_anew(tmp_path: Path) -> None:
    """The process that is forked has read such settings already."""
    log = tmp_path / "log"
    process = start([*python("engine"), "--help"], {"OMP_NUM_THREADS": "7"}, log)
    assert isinstance(process, ForkingPopen)
    assert not process.is_forked
    assert process.wait(WAIT_SECONDS) == 0
    assert "--backend" in log.read_text()


def test_so_is_one_where_the_test_itself_has_changed_such_a_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    process = start([*python("engine"), "--help"], {}, tmp_path / "log")
    assert isinstance(process, ForkingPopen)
    assert not process.is_forked
    assert process.wait(WAIT_SECONDS) == 0


def test_other_programs_are_started_anew(tmp_path: Path) -> None:
    process = start([sys.executable, "-c", "raise SystemExit(3)"], {}, tmp_path / "log")
    assert process.wait(WAIT_SECONDS) == 3


@pytest.mark.skipif(not CAN_FORK, reason="this system has no pidfd_open")
def test_servers_die_with_a_process_that_is_killed_while_they_run() -> None:
    words = [sys.executable, "-c", FORKS]
    with subprocess.Popen(
        words, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        assert process.stdout is not None
        server = os.pidfd_open(int(process.stdout.readline()))
        process.kill()
    ended, _, _ = select.select([server], [], [], WAIT_SECONDS)
    os.close(server)
    assert ended
