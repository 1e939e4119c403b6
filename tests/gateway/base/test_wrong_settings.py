"""Every setting of the gateway with a wrong value: refused at the start in a line that names it."""

import subprocess
import sys
from pathlib import Path

import pytest

from gateway.base.settings import PREFIX, Settings, SettingsError, load
from scripts.stack import ROOT, free_port

NEEDED = {"HOLDFAST_ENGINE_SECRET": "e", "HOLDFAST_MASTER_SECRET": "m"}
NUMBERS = [n for n, field in Settings.model_fields.items() if field.annotation in (int, float)]
SECRETS = ["API_KEY", "ADMIN_KEY", "ENGINE_SECRET"]


def refusal(variable: str, value: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load({**NEEDED, variable: value})
    return str(caught.value)


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_bound_at_both_ends(name: str) -> None:
    """A drain of 1e30 seconds never ended; others were an overflow long after the start."""
    variable = PREFIX + name.upper()
    for wrong in ("-1", "1" + "0" * 30, "inf", "nan", "many", "٣", "８ é"):
        told = refusal(variable, wrong)
        assert told.startswith(f"{variable}: ") and len(told.splitlines()) == 1


@pytest.mark.parametrize("name", SECRETS)
@pytest.mark.parametrize("wrong", ["x ", " x", "é", "a\nb: c", "a\x00", "\t "])
def test_a_secret_fits_in_a_header(name: str, wrong: str) -> None:
    """No request could ever show such a key, and a line break in it is a header of its own."""
    told = refusal(PREFIX + name, wrong)
    assert told in (
        f"{PREFIX}{name}: must not be empty",
        f"{PREFIX}{name}: must be printable ASCII without blanks at its ends",
    )


def test_the_master_secret_goes_into_no_header() -> None:
    """Scopes follow from it to the letter, so one that was in use stays in use."""
    assert refusal("HOLDFAST_MASTER_SECRET", "\t ") == "HOLDFAST_MASTER_SECRET: must not be empty"
    given = load({**NEEDED, "HOLDFAST_MASTER_SECRET": " é "}).master_secret
    assert given.get_secret_value() == " é "


@pytest.mark.parametrize(
    "url",
    [
        "sqlite+aiosqlite://",
        "sqlite+aiosqlite:///",
        "sqlite+aiosqlite:///:memory:",
        "postgresql+psycopg://[::1/x",
        "postgresql+psycopg://u:secret@h:99999/x",
        "mysql://u:secret@h/x",
    ],
)
def test_a_database_is_a_file_or_a_server(url: str) -> None:
    told = refusal("HOLDFAST_DATABASE_URL", url)
    assert told.startswith("HOLDFAST_DATABASE_URL: must ") and "secret" not in told


@pytest.mark.parametrize("name", ["PRICES", "HOSTED_PRICES", "MODELS"])
def test_a_file_must_be_there(name: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone.toml"
    assert refusal(PREFIX + name, str(gone)) == f"{PREFIX}{name}: No such file or directory: {gone}"
    assert "Is a directory" in refusal(PREFIX + name, str(tmp_path))
    assert refusal(PREFIX + name, "9" * 5000).startswith(f"{PREFIX}{name}: File name too long")


def test_a_directory_has_a_name_that_can_be_made() -> None:
    assert refusal("HOLDFAST_DATA", "9" * 5000) == "HOLDFAST_DATA: File name too long"


def test_an_empty_variable_counts_as_unset_and_an_empty_file_is_told(tmp_path: Path) -> None:
    empty = {PREFIX + name.upper(): "" for name in Settings.model_fields}
    assert load({**empty, **NEEDED}) == load(NEEDED)
    file = tmp_path / "secret"
    file.write_bytes(b"\n")
    assert refusal("HOLDFAST_API_KEY_FILE", str(file)).startswith("HOLDFAST_API_KEY_FILE: is empty")
    file.write_bytes(b"\xff\xfe")
    assert refusal("HOLDFAST_API_KEY_FILE", str(file)).startswith("HOLDFAST_API_KEY_FILE: is not U")


@pytest.mark.parametrize("host", ["no-such.invalid", "127.0.0.1 ", "9" * 300, "é é"])
def test_an_address_that_is_none_ends_the_start(host: str, tmp_path: Path) -> None:
    """A name that is too long left a process that served nothing."""
    environment = {**NEEDED, "HOLDFAST_HOST": host, "HOLDFAST_DATA": str(tmp_path / "data")}
    ended = subprocess.run(
        [sys.executable, "-m", "gateway", "serve"],
        env={**environment, "HOLDFAST_PORT": str(free_port())},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 2
    assert ended.stderr == "HOLDFAST_HOST: must be an address of this machine\n"
