"""The engine as a program: what it refuses to start with, and what it warns of."""

import os
import subprocess
import sys

import pytest

from engine.settings import misspelt
from scripts.stack import free_port

SECRET = {"ENGINE_SECRET": "a-secret-of-some-length"}


def engine(environment: dict[str, str], seconds: float = 60) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        [sys.executable, "-m", "engine", "--backend", "synthetic"],
        env={"PATH": os.environ["PATH"], **environment},
        capture_output=True,
        text=True,
        timeout=seconds,
    )


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        pytest.param({}, "ENGINE_SECRET", id="no-secret"),
        pytest.param({"ENGINE_SECRET": "short"}, "ENGINE_SECRET", id="short-secret"),
        pytest.param({**SECRET, "ENGINE_PORT": "x"}, "ENGINE_PORT", id="no-number"),
        pytest.param(
            {**SECRET, "ENGINE_TEMPLATE_DATE": "tomorrow"}, "ENGINE_TEMPLATE_DATE", id="no-day"
        ),
        pytest.param({**SECRET, "ENGINE_TTL_SCALE": "2"}, "ENGINE_TTL_SCALE", id="longer-ttls"),
        pytest.param(
            {**SECRET, "ENGINE_CLOCK": "manual", "ENGINE_HOST": "0.0.0.0"},
            "ENGINE_CLOCK",
            id="manual-clock-beyond-loopback",
        ),
        pytest.param({**SECRET, "ENGINE_ROLE": "prefill"}, "ENGINE_ROLE", id="role-without-store"),
        pytest.param(
            {**SECRET, "ENGINE_ROLE": "decode", "ENGINE_STORE": "/nowhere"},
            "ENGINE_STORE_SHARED",
            id="role-without-shared-store",
        ),
    ],
)
def test_a_bad_setting_ends_the_start_and_is_named(environment: dict[str, str], named: str) -> None:
    ended = engine(environment)
    assert ended.returncode == 2
    assert named in ended.stderr and len(ended.stderr.splitlines()) == 1
    assert "short" not in ended.stderr, "the value of a secret is not shown"


def test_scaled_ttls_and_a_manual_clock_are_logged_loudly() -> None:
    environment = {
        **SECRET,
        "ENGINE_TTL_SCALE": "0.01",
        "ENGINE_CLOCK": "manual",
        "ENGINE_PORT": str(free_port()),
    }
    with subprocess.Popen(
        [sys.executable, "-m", "engine", "--backend", "synthetic"],
        env={"PATH": os.environ["PATH"], **environment},
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline() for _ in range(2)]
        process.terminate()
    assert all('"level": "warning"' in line for line in lines)
    assert "TTLS ARE SCALED" in lines[0]
    assert "THE CLOCK IS MANUAL" in lines[1]


def test_a_name_that_is_almost_a_setting_is_told_and_others_are_not() -> None:
    given = {"ENGINE_SECRT": "x", "ENGINE_SECRET": "y", "ENGINE_SERVICE_HOST": "z", "PATH": "w"}
    assert misspelt(given) == ["ENGINE_SECRT is no setting: did you mean ENGINE_SECRET?"]


def test_a_setting_that_is_needed_says_what_it_is() -> None:
    assert "ENGINE_SECRET: is not set; it is needed: Shared secret" in engine({}).stderr
