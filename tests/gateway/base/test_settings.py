import subprocess
import sys
from pathlib import Path

import pytest

from engine.variables import misspelt
from gateway.base.settings import PREFIX, EnginePlace, Settings, SettingsError, load
from scripts.stack import ROOT, free_port
from tests.gateway.admin.test_wrong_values import URLS

NEEDED = {"HOLDFAST_ENGINE_SECRET": "e", "HOLDFAST_MASTER_SECRET": "m"}

NUMBERS = [n for n, field in Settings.model_fields.items() if field.annotation in (int, float)]
SECRETS = ["API_KEY", "ADMIN_KEY", "ENGINE_SECRET"]


def refusal(variable: str, value: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load({**NEEDED, variable: value})
    return str(caught.value)


def test_every_wrong_setting_is_named_at_once() -> None:
    wrong = {
        "HOLDFAST_ENGINES": "ftp://x",
        "HOLDFAST_PORT": "many",
        "HOLDFAST_DATABASE_URL": "mysql://x",
        "HOLDFAST_LOG_LEVEL": "loud",
        "HOLDFAST_MASTER_SECRET": "m",
    }
    with pytest.raises(SettingsError) as caught:
        load(wrong)
    assert "HOLDFAST_ENGINE_SECRET: is not set; it is needed: " in str(caught.value)
    for name in (*wrong, "HOLDFAST_ENGINE_SECRET"):
        assert (name in str(caught.value)) is (name != "HOLDFAST_MASTER_SECRET")


def test_secrets_may_come_from_files_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "secret"
    file.write_text("from-a-file\n")
    settings = load({**NEEDED, "HOLDFAST_API_KEY_FILE": str(file)})
    assert settings.api_key is not None
    assert settings.api_key.get_secret_value() == "from-a-file"
    assert "from-a-file" not in repr(settings)
    with pytest.raises(SettingsError, match="HOLDFAST_API_KEY_FILE"):
        load({**NEEDED, "HOLDFAST_API_KEY_FILE": str(tmp_path / "none")})


def test_a_name_that_is_almost_a_setting_is_told_and_others_are_not() -> None:
    environment = {
        **NEEDED,
        "HOLDFAST_ENGINS": "x",
        "HOLDFAST_API_KEYS_FILE": "x",
        "HOLDFAST_API_KEY_FILE": "x",
        "HOLDFAST_SERVICE_HOST": "x",
    }
    names = [PREFIX + name.upper() for name in Settings.model_fields]
    assert misspelt(environment, names) == [
        "HOLDFAST_API_KEYS_FILE is no setting: did you mean HOLDFAST_API_KEY?",
        "HOLDFAST_ENGINS is no setting: did you mean HOLDFAST_ENGINES?",
    ]


def test_an_engines_name_depends_on_its_own_entry_only() -> None:
    entries = ["http://a:8100", "b=http://10.0.0.2:8100", "https://c.example/engine/x"]
    names = []
    for order in (entries, entries[::-1]):
        loaded = load({**NEEDED, "HOLDFAST_ENGINES": ",".join(order)})
        names.append({place.url: place.name for place in map(EnginePlace.parse, loaded.engines)})
    assert names[0] == names[1]
    assert list(names[0].values()) == ["a:8100", "b", "c.example-engine-x"]
    for wrong in ("a=http://x,a=http://y", "a b=http://x", "=http://x", "a=ftp://x"):
        with pytest.raises(SettingsError, match="HOLDFAST_ENGINES"):
            load({**NEEDED, "HOLDFAST_ENGINES": wrong})


@pytest.mark.parametrize("url", URLS)
def test_an_engines_url_is_checked_as_the_admin_api_checks_it(url: str) -> None:
    """A line break in it was a header of ours, and a password in it was logged."""
    for name in ("", "b="):
        message = "HOLDFAST_ENGINES: URL 2 must be http:// or https://, a host, "
        reason = refusal("HOLDFAST_ENGINES", f"http://a:8100,{name}{url}")
        assert reason == f"{message}and no more than a port and a path"


@pytest.mark.parametrize("name", ["batch_seconds", "cached_content_seconds", "max_blocks"])
def test_tuning_is_an_object_of_known_names_with_bounds(name: str) -> None:
    """A batch that ends behind the year 9999 was a 500."""
    for wrong in ("1e17", "0", "-1", '"x"', "NaN"):
        message = refusal("HOLDFAST_TUNING", f'{{"{name}": {wrong}}}')
        assert message.startswith(f"HOLDFAST_TUNING: {name}: ")
    longest = load({**NEEDED, "HOLDFAST_TUNING": f'{{"{name}": 315360000}}'}).tuning
    assert getattr(longest, name) == 10 * 365 * 86_400
    for wrong in ("x", "[]", '{"no_such": 1}', "[" * 100_000):
        assert refusal("HOLDFAST_TUNING", wrong).startswith("HOLDFAST_TUNING: ")


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_has_a_bound_at_both_ends(name: str) -> None:
    """A drain of 1e30 seconds never ended; others were an overflow long after the start."""
    variable = PREFIX + name.upper()
    for wrong in ("-1", "1" + "0" * 30, "inf", "nan", "many", "٣", "８ é"):
        message = refusal(variable, wrong)
        assert message.startswith(f"{variable}: ") and len(message.splitlines()) == 1


@pytest.mark.parametrize("name", SECRETS)
def test_a_secret_fits_in_a_header(name: str) -> None:
    """No request could ever show such a key, and a line break in it is a header of its own."""
    for wrong in ("x ", " x", "é", "a\nb: c", "a\x00", "\t "):
        assert refusal(PREFIX + name, wrong) in (
            f"{PREFIX}{name}: must not be empty",
            f"{PREFIX}{name}: must be printable ASCII without blanks at its ends",
        )


def test_the_master_secret_goes_into_no_header() -> None:
    """Scopes follow from it to the letter, so one that was in use stays in use."""
    assert refusal("HOLDFAST_MASTER_SECRET", "\t ") == "HOLDFAST_MASTER_SECRET: must not be empty"
    secret = load({**NEEDED, "HOLDFAST_MASTER_SECRET": " é "}).master_secret
    assert secret.get_secret_value() == " é "


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
    message = refusal("HOLDFAST_DATABASE_URL", url)
    assert message.startswith("HOLDFAST_DATABASE_URL: must ") and "secret" not in message


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


@pytest.mark.parametrize("host", ["no-such.invalid", "9" * 300])
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
