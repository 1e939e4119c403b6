"""A gateway that can not start says why in one line, and ends with the status of that."""

import socket
from pathlib import Path

from uvicorn.config import STARTUP_FAILURE

from scripts.stack import free_port, gateway_environment, python, start

SECONDS = 300


def started(data: Path, port: int) -> tuple[int, str]:
    """The status that it ended with, and what it said."""
    settings = gateway_environment(port, data, ["http://127.0.0.1:9"])
    log = data / "log"
    status = start([*python("gateway"), "serve"], settings, log).wait(SECONDS)
    return status, log.read_text("utf-8")


def test_a_journal_that_can_not_be_made_is_named_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "journal").touch()
    status, output = started(tmp_path, free_port())
    assert status == STARTUP_FAILURE, output
    assert f"journal `{tmp_path / 'journal'}`: File exists" in output
    assert "Traceback" not in output


def test_a_port_that_another_process_has_is_named(tmp_path: Path) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        status, output = started(tmp_path, port)
    assert status != 0, output
    assert f"('127.0.0.1', {port})" in output and "ddress already in use" in output
    assert "Traceback" not in output
