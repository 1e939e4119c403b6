"""The engine as a program: what it refuses to start with, and what it warns of."""

import os
import subprocess
import sys

import pytest
from pydantic import ValidationError

from engine.settings import Settings, misspelt, problems_of
from scripts.stack import free_port

SECRET = {"ENGINE_SECRET": "a-secret-of-some-length"}
NUMBERS = [
    name
    for name, field in Settings.model_fields.items()
    if field.annotation in (int, float, int | None)
]


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
        pytest.param({"ENGINE_SECRET": "short"}, "16 or more", id="short-secret"),
        pytest.param({"ENGINE_SECRET": "é" * 20}, "printable ASCII", id="no-header"),
        pytest.param({**SECRET, "ENGINE_HOST": "9" * 300}, "ENGINE_HOST: must", id="no-name"),
        pytest.param({**SECRET, "ENGINE_HOST": "127.0.0.1 "}, "ENGINE_HOST: must", id="a-blank"),
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


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_bound_at_both_ends(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """1e30 blocks were an engine that loaded for ever, 1e30 threads a traceback of torch."""
    monkeypatch.setenv("ENGINE_SECRET", SECRET["ENGINE_SECRET"])
    for wrong in ("-1", "1" + "0" * 30, "inf", "nan", "many", "٣"):
        monkeypatch.setenv(f"ENGINE_{name.upper()}", wrong)
        with pytest.raises(ValidationError) as caught:
            Settings.model_validate({})
        (told,) = problems_of(caught.value)
        assert told.startswith(f"ENGINE_{name.upper()}: ")


def test_all_numbers_are_seen_above() -> None:
    assert len(NUMBERS) > 15 and {"threads", "num_blocks", "lease_share"} < set(NUMBERS)


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty ENGINE_HOST was every address of the machine."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"ENGINE_{name.upper()}", "")
    monkeypatch.setenv("ENGINE_SECRET", SECRET["ENGINE_SECRET"])
    settings = Settings.model_validate({})
    assert settings.host == "127.0.0.1"
    for name, field in Settings.model_fields.items():
        assert name == "secret" or getattr(settings, name) == field.default, name
