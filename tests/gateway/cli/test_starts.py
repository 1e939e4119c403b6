"""A gateway that can not start says why in one line, and ends with the status of that."""

import socket
from pathlib import Path

import pytest
from uvicorn.config import STARTUP_FAILURE

from scripts.stack import free_port, gateway_environment, python, start

SECONDS = 300


def started(data: Path, num_workers: int, port: int) -> tuple[int, str]:
    """The status that it ended with, and what it said."""
    settings, log = gateway_environment(port, data, ["http://127.0.0.1:9"]), data / "log"
    command = [*python("gateway"), "serve", "--workers", str(num_workers)]
    status = start(command, settings, log).wait(SECONDS)
    return status, log.read_text("utf-8")


@pytest.mark.parametrize("num_workers, journal", [(1, "journal"), (2, "journal-2")])
def test_a_journal_that_can_not_be_made_is_named_in_one_line(
    tmp_path: Path, num_workers: int, journal: str
) -> None:
    (tmp_path / journal).touch()
    status, said = started(tmp_path, num_workers, free_port())
    assert status == STARTUP_FAILURE, said
    assert f"journal `{tmp_path / journal}`: File exists" in said
    assert "Traceback" not in said
    if num_workers > 1:
        assert '"worker_never_served"' in said


def test_a_port_that_another_process_has_is_named(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        status, said = started(tmp_path, 2, port)
    assert status == STARTUP_FAILURE, said
    assert f'"address": "127.0.0.1:{port}"' in said and "Address already in use" in said
    assert "Traceback" not in said
