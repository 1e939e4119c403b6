"""The dashboard as a program: what it refuses to start with."""

import os
import subprocess
import sys

import pytest

from dashboard.settings import Settings
from scripts.stack import ROOT


def dashboard(*arguments: str, **environment: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "dashboard", *arguments],
        env={"PATH": os.environ["PATH"], **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("HOST", "9" * 300),
        ("GATEWAY_URL", "http://127.0.0.1:8080 "),
        ("GATEWAY_URL", "http://"),
        ("GATEWAY_URL", "http://[::1"),
        ("PORT", "0"),
        ("SESSION_HOURS", "inf"),
        ("TRUSTED_PROXIES", "x"),
    ],
)
def test_a_wrong_setting_ends_the_start_and_is_named(name: str, wrong: str) -> None:
    ended = dashboard(**{f"DASHBOARD_{name}": wrong})
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"dashboard: DASHBOARD_{name}: ")
    assert len(ended.stderr.splitlines()) == 1 and "Value error" not in ended.stderr


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty DASHBOARD_HOST was every address of the machine."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"DASHBOARD_{name.upper()}", "")
    assert Settings.model_validate({}).host == "127.0.0.1"


def test_help_is_printed_and_other_words_are_refused() -> None:
    """Both started a server."""
    assert dashboard("--help").stdout.startswith("usage: python -m dashboard")
    assert dashboard("bogus").returncode == 2
