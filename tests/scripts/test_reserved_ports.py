"""scripts/setup/reserved_ports.py: who starts a server gets a port that nobody else gets."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from scripts.setup import reserved_ports
from scripts.setup.reserved_ports import FIRST, HOST, LAST, Reservations, candidates
from scripts.stack import ROOT, free_port
from tests.scripts.runs import LISTENED, free_base

# Takes as many ports as it is told to, says which, and keeps them until its input ends.
TAKER = """
import sys
from pathlib import Path
from scripts.setup.reserved_ports import Reservations
file, first, last, count = sys.argv[1:]
ours = Reservations(Path(file), range(int(first), int(last)))
print(*[ours.take() for _ in range(int(count))], flush=True)
sys.stdin.read()
"""


@contextmanager
def taken(file: Path, ports: range, count: int) -> Iterator["subprocess.Popen[str]"]:
    command = [sys.executable, "-c", TAKER, *map(str, (file, ports.start, ports.stop, count))]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, cwd=ROOT, stdin=pipe, stdout=pipe, text=True) as process:
        yield process


def said(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


def test_processes_that_take_ports_at_once_get_none_twice(tmp_path: Path) -> None:
    """And those of a process that ended are given again, but for one that somebody listens on."""
    # A hundred neighbours that the tests' own servers do not get meanwhile.
    base = reserved_ports.of_this_process().take(range(100))
    file, ports = tmp_path / "ports", range(base, base + 100)
    mine = Reservations(file, ports)
    with ExitStack() as stack:
        # Of 100 ports three processes take 90, so that each meets what the others keep.
        takers = [stack.enter_context(taken(file, ports, 30)) for _ in range(3)]
        got = [port for one in takers for port in said(one)]
        assert len(got) == len(set(got)) == 90 and set(got) <= set(ports)
        assert {mine.take() for _ in range(10)} == set(ports) - set(got)
        with pytest.raises(OSError, match="no port is free"):
            mine.take()
    with socket.socket() as other:
        other.bind((HOST, got[0]))
        other.listen()
        assert {mine.take() for _ in range(89)} == set(got[1:])
        with pytest.raises(OSError, match="no port is free"):
            mine.take()
    assert mine.take() == got[0]


def test_a_port_is_outside_the_range_of_outgoing_connections(tmp_path: Path) -> None:
    got = [free_port() for _ in range(50)] + [free_base() + above for above in LISTENED]
    assert len(set(got)) == len(got) and set(got) <= set(candidates())
    said_range = tmp_path / "range"
    said_range.write_text("20000\t64000\n")
    assert 19_999 in candidates(said_range) and 20_000 not in candidates(said_range)
    assert 49_152 not in candidates(tmp_path / "none"), "IANA's range, where the kernel says none"
    said_range.write_text("1024\t65535\n")
    assert len(candidates(said_range)) == LAST - FIRST + 1, "a range that leaves few"
