"""The gateway's command line."""

import io
from collections.abc import Mapping
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from gateway.cli.main import main


def say_to_gateway(environment: Mapping[str, str], *words: str, status: int = 0) -> str:
    """What `python -m gateway WORDS` prints, which ends with `status`. In this process: another
    Python takes a second."""
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(printed):
        for name, value in environment.items():
            patch.setenv(name, value)
        assert main(words) == status, printed.getvalue()
    return printed.getvalue()


def new_key(data: Path, workspace: str) -> tuple[str, str]:
    """The id and the key of a new one, made by the command line as an operator would."""
    words = ("keys", "create", "--workspace", workspace)
    key_id, key = say_to_gateway({"HOLDFAST_DATA": str(data)}, *words).split()
    return key_id, key
