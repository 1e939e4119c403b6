"""A gateway in a process of its own, where a test looks at the process."""

import io
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import pytest

from gateway.cli.main import main
from scripts.stack import Process, serving_gateway
from tests.gateway.serving import ADMIN_KEY, API_KEY


def say_to_gateway(environment: Mapping[str, str], *words: str) -> str:
    """What `python -m gateway WORDS` prints. In this process: another Python takes a second."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        for name, value in environment.items():
            patch.setenv(name, value)
        assert main(words) == 0, printed.getvalue()
    return printed.getvalue()


@contextmanager
def gateway_process(
    data: Path, engine: str, log: Path, changes: Mapping[str, str] | None = None
) -> Iterator[tuple[str, Process]]:
    """Start `python -m gateway serve`, wait until an engine is ready, end it whatever happens.

    What it writes goes to `log`; `changes` are further settings.
    """
    settings = {
        "HOLDFAST_API_KEY": API_KEY,
        "HOLDFAST_ADMIN_KEY": ADMIN_KEY,
        "HOLDFAST_ENGINE_SECRET": "engine-secret",
        "HOLDFAST_MASTER_SECRET": "master",
        **(changes or {}),
    }
    with serving_gateway(data, [engine], settings, log) as server:
        yield server.wait().url, server.process
