"""The disk of the log is full: gateway and engine serve on, and tell how many lines are missing."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from engine.lines import LineLogger
from scripts.bench.load import body_of
from scripts.stack import API_HEADERS, running_stack
from tests.gateway.records import ledger_rows
from tests.gateway.serving import eventually

TURNS = 30


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A real file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    yield place
    subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(disk: Path) -> Path:
    """A file that takes all that is left."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file, pytest.raises(OSError, match="No space left"):
        while True:
            file.write(b"x" * 512)
    return filler


def events(log: Path) -> list[str]:
    """The events of all lines that are whole. What stood at the edge of the full disk is cut."""
    names = []
    for line in log.read_text("utf-8").splitlines():
        try:
            names.append(json.loads(line)["event"])
        except ValueError:
            continue
    return names


def test_a_full_disk_of_the_log_ends_no_turn(small_disk: Path, tmp_path: Path) -> None:
    settings = {"HOLDFAST_ACCESS_LOG": "true", "HOLDFAST_LOG_LEVEL": "debug"}
    data = tmp_path / "data"
    with running_stack(
        data,
        "synthetic",
        engine_settings={"ENGINE_LOG_LEVEL": "debug"},
        gateway_settings=settings,
        logs=small_disk,
    ) as stack:

        def ask(number: int, **changes: object) -> httpx.Response:
            body = body_of("synthetic", "Rules. " * 50, f"Question {number}", max_tokens=3)
            url = f"{stack.gateway}/v1/messages"
            return httpx.post(url, json=body | changes, headers=API_HEADERS, timeout=120)

        assert ask(0).status_code == 200
        filler = fill(small_disk)
        for number in range(TURNS):
            reply = ask(number)
            assert reply.status_code == 200, reply.text
            assert "message_stop" in ask(number, stream=True).text
            # What is refused is logged, too.
            assert ask(number, messages="none").status_code == 400
        filler.unlink()
        log = small_disk / "gateway.log"

        def is_told() -> bool:
            ask(0)
            return "log_lines_failed" in events(log)

        eventually(is_told)
        rows = ledger_rows(f"sqlite:///{data / 'ledger.db'}")
        eventually(lambda: len(ledger_rows(f"sqlite:///{data / 'ledger.db'}")) > 2 * TURNS)
    assert {row["status"] for row in rows} == {200}


def test_lines_that_failed_are_counted_and_told_by_the_next_that_works(tmp_path: Path) -> None:
    path = tmp_path / "log"
    descriptor = os.open("/dev/full", os.O_WRONLY)
    logger = LineLogger(descriptor)
    logger.info("one")
    logger.error("two")
    assert logger.num_failed == 2
    with path.open("w") as log:
        os.dup2(log.fileno(), descriptor)
    logger.info("three")
    logger.info("four")
    os.close(descriptor)
    assert logger.num_failed == 0
    lines = path.read_text().splitlines()
    assert lines[0] == "" and json.loads(lines[1])["lines"] == 2
    assert lines[2:] == ["three", "four"]
