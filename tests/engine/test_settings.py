"""The engine as a program: what it refuses to start with, and what it warns of."""

import os
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from engine.settings import Settings, problems_of
from scripts.stack import free_port

SECRET = {"ENGINE_SECRET": "a-secret-of-some-length"}
NUMBERS = [
    name
    for name, field in Settings.model_fields.items()
    if field.annotation in (int, float, int | None)
]


def engine(environment: dict[str, str]) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "engine", "--backend", "synthetic"],
        env={"PATH": os.environ["PATH"], **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({}, "ENGINE_SECRET: is not set; it is needed: Shared secret"),
        ({"ENGINE_SECRET": "short"}, "ENGINE_SECRET"),
        ({**SECRET, "ENGINE_PORT": "x"}, "ENGINE_PORT"),
        ({**SECRET, "ENGINE_HOST": "9" * 300}, "ENGINE_HOST: must"),
        ({**SECRET, "ENGINE_HOST": "127.0.0.1 "}, "ENGINE_HOST: must"),
    ],
)
def test_a_bad_setting_ends_the_start_and_is_named(environment: dict[str, str], named: str) -> None:
    with engine(environment) as process:
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert named in errors and len(errors.splitlines()) == 1
    assert "short" not in errors, "the value of a secret is not shown"


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"secret": "short"}, "16 or more"),
        ({"secret": "é" * 20}, "printable ASCII"),
        ({"clock": "manual", "host": "0.0.0.0"}, "ENGINE_CLOCK"),
        ({"role": "prefill"}, "ENGINE_ROLE"),
        ({"role": "decode", "store": "/nowhere"}, "ENGINE_STORE_SHARED"),
    ],
)
def test_what_is_no_setting_is_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Settings.model_validate({"secret": SECRET["ENGINE_SECRET"]} | settings)
    assert any(named in problem for problem in problems_of(caught.value))


def test_a_manual_clock_is_logged_loudly() -> None:
    loud = {"ENGINE_CLOCK": "manual", "ENGINE_PORT": str(free_port())}
    with engine({**SECRET, **loud}) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        process.terminate()
        process.communicate()
    assert '"level": "warning"' in line and "THE CLOCK IS MANUAL" in line


def test_a_number_has_a_bound_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """1e30 blocks were an engine that loaded for ever."""
    assert len(NUMBERS) > 12 and {"max_running", "num_blocks", "lease_share"} < set(NUMBERS)
    monkeypatch.setenv("ENGINE_SECRET", SECRET["ENGINE_SECRET"])
    for name in (f"ENGINE_{number.upper()}" for number in NUMBERS):
        for wrong in ("-1", "1" + "0" * 30, "inf", "nan", "many", "٣"):
            with monkeypatch.context() as set_one, pytest.raises(ValidationError) as caught:
                set_one.setenv(name, wrong)
                Settings.model_validate({})
            (problem,) = problems_of(caught.value)
            assert problem.startswith(f"{name}: ")


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty ENGINE_HOST was every address of the machine."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"ENGINE_{name.upper()}", "")
    monkeypatch.setenv("ENGINE_SECRET", SECRET["ENGINE_SECRET"])
    settings = Settings.model_validate({})
    assert settings.host == "127.0.0.1"
    for name, field in Settings.model_fields.items():
        assert name == "secret" or getattr(settings, name) == field.default, name
