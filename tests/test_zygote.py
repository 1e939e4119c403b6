"""Processes that run tests are forked, and a launcher without a zygote starts plain Python."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.stack import ROOT
from tests import forked

WAIT_SECONDS = 300
PR_GET_PDEATHSIG = 2
LAUNCHER = [sys.executable, "-S", "-E", str(ROOT / "tests" / "launcher.py")]


@pytest.mark.skipif(not forked.CAN_FORK, reason="this system has no pidfd_open")
def test_a_process_that_runs_tests_is_forked_and_so_is_what_its_servers_are_forked_from() -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:  # not a mark: the zygote would evaluate that
        pytest.skip("one process runs the tests")
    parent = Path(f"/proc/{os.getppid()}/cmdline").read_bytes().split(b"\0")
    assert b"tests.zygote" in parent
    assert not forked.source().is_started
    told = ctypes.c_int()
    assert ctypes.CDLL(None).prctl(PR_GET_PDEATHSIG, ctypes.byref(told)) == 0
    assert told.value == signal.SIGKILL, "it dies with the zygote"


def test_a_launcher_without_a_zygote_becomes_the_command(tmp_path: Path) -> None:
    code = "import sys; print(len(sys.argv), sys.stdin.read())"
    words = [*LAUNCHER, str(tmp_path / "none"), "-u", "-c", code]
    said = subprocess.run(
        words, input="given", capture_output=True, text=True, timeout=WAIT_SECONDS, check=True
    )
    assert said.stdout == "1 given\n"
