"""scripts/setup/reserved_ports.py: who starts a server gets a port that nobody else gets."""

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from scripts.setup.reserved_ports import (
    FIRST,
    HOST,
    LAST,
    Reservations,
    candidates,
    of_this_process,
)
from scripts.stack import ROOT, free_port
from tests.scripts.runs import LISTENED, free_base

# Takes as many ports as it is told to, says which, and keeps them until its input ends.
TAKER = """
import sys
from pathlib import Path
from scripts.setup.reserved_ports import Reservations
file, first, last, count, *above = sys.argv[1:]
ours = Reservations(Path(file), range(int(first), int(last)))
shifts = [int(text) for text in above]
print(*[ours.take(shifts) for _ in range(int(count))], flush=True)
sys.stdin.read()
"""


@contextmanager
def taker(file: Path, ports: range, count: int, *above: int) -> Iterator["subprocess.Popen[str]"]:
    words = map(str, (file, ports.start, ports.stop, count, *above))
    process = subprocess.Popen(
        [sys.executable, "-c", TAKER, *words],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        yield process


def said(process: "subprocess.Popen[str]") -> list[int]:
    assert process.stdout is not None
    return [int(word) for word in process.stdout.readline().split()]


@pytest.fixture
def ports() -> range:
    """Two hundred neighbours that the tests' own servers do not get meanwhile."""
    base = of_this_process().take(range(200))
    return range(base, base + 200)


def test_processes_that_take_ports_at_once_get_none_twice(tmp_path: Path, ports: range) -> None:
    file = tmp_path / "ports"
    with ExitStack() as stack:
        # Of 200 ports four processes take 180, so that each meets what the others keep.
        takers = [stack.enter_context(taker(file, ports, 45, 0)) for _ in range(4)]
        got = [port for one in takers for port in said(one)]
        assert len(got) == len(set(got)) == 180 and set(got) <= set(ports)
        mine = Reservations(file, ports)
        assert {mine.take() for _ in range(20)} == set(ports) - set(got)
        with pytest.raises(OSError, match="no port is free"):
            mine.take()


def test_ports_of_a_process_that_ended_are_given_again(tmp_path: Path, ports: range) -> None:
    file, few = tmp_path / "ports", ports[:5]
    with taker(file, few, 5, 0) as process:
        kept = said(process)
        mine = Reservations(file, few)
        with pytest.raises(OSError, match="no port is free"):
            mine.take()
    assert {mine.take() for _ in kept} == set(kept)


def test_a_port_that_somebody_listens_on_is_not_given(tmp_path: Path, ports: range) -> None:
    mine = Reservations(tmp_path / "ports", ports[:3])
    with socket.socket() as other:
        other.bind((HOST, ports[1]))
        other.listen()
        assert {mine.take(), mine.take()} == {ports[0], ports[2]}
        with pytest.raises(OSError, match="no port is free"):
            mine.take()
    assert mine.take() == ports[1]


def test_a_port_is_outside_the_range_of_outgoing_connections(tmp_path: Path) -> None:
    got = [free_port() for _ in range(50)] + [free_base() + above for above in LISTENED]
    assert len(set(got)) == len(got) and set(got) <= set(candidates())
    said_range = tmp_path / "range"
    said_range.write_text("20000\t64000\n")
    assert 19_999 in candidates(said_range) and 20_000 not in candidates(said_range)
    assert 49_152 not in candidates(tmp_path / "none"), "IANA's range, where the kernel says none"
    said_range.write_text("1024\t65535\n")
    assert len(candidates(said_range)) == LAST - FIRST + 1, "a range that leaves few"
