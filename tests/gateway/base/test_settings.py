from pathlib import Path

import pytest

from gateway.base.engine_places import EnginePlace
from gateway.base.settings import Settings, SettingsError, load, misspelt
from tests.gateway.admin.test_wrong_values import URLS

NEEDED = {"HOLDFAST_ENGINE_SECRET": "e", "HOLDFAST_MASTER_SECRET": "m"}


def test_defaults_are_those_of_one_machine() -> None:
    settings = load(NEEDED)
    assert settings.engines == ("http://127.0.0.1:8100",)
    assert settings.ledger_url == "sqlite+aiosqlite:///data/ledger.db"
    assert (settings.host, settings.port) == ("127.0.0.1", 8080)


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
    given = {
        **NEEDED,
        "HOLDFAST_ENGINS": "x",
        "HOLDFAST_API_KEYS_FILE": "x",
        "HOLDFAST_API_KEY_FILE": "x",
        "HOLDFAST_SERVICE_HOST": "x",
    }
    assert misspelt(given) == [
        "HOLDFAST_API_KEYS_FILE is no setting: did you mean HOLDFAST_API_KEY?",
        "HOLDFAST_ENGINS is no setting: did you mean HOLDFAST_ENGINES?",
    ]


def test_a_setting_that_is_needed_says_what_it_is() -> None:
    with pytest.raises(SettingsError, match="HOLDFAST_ENGINE_SECRET: is not set; it is needed: "):
        load({"HOLDFAST_MASTER_SECRET": "m"})


def test_every_setting_is_described() -> None:
    assert all(field.description for field in Settings.model_fields.values())
    assert len(Settings.model_fields) <= 30


def test_an_engines_name_depends_on_its_own_entry_only() -> None:
    entries = ["http://a:8100", "b=http://10.0.0.2:8100", "https://c.example/engine/x"]
    secrets = {"HOLDFAST_ENGINE_SECRET": "e", "HOLDFAST_MASTER_SECRET": "m"}
    names = []
    for order in (entries, entries[::-1]):
        loaded = load({**secrets, "HOLDFAST_ENGINES": ",".join(order)})
        names.append({place.url: place.name for place in map(EnginePlace.parse, loaded.engines)})
    assert names[0] == names[1]
    assert list(names[0].values()) == ["a:8100", "b", "c.example-engine-x"]
    for wrong in ("a=http://x,a=http://y", "a b=http://x", "=http://x", "a=ftp://x"):
        with pytest.raises(SettingsError, match="HOLDFAST_ENGINES"):
            load({**secrets, "HOLDFAST_ENGINES": wrong})


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize("name", ["", "b="])
def test_an_engines_url_is_checked_as_the_admin_api_checks_it(name: str, url: str) -> None:
    """A line break in it was a header of ours, and a password in it was logged."""
    with pytest.raises(SettingsError) as caught:
        load({**NEEDED, "HOLDFAST_ENGINES": f"http://a:8100,{name}{url}"})
    told = "HOLDFAST_ENGINES: URL 2 must be http:// or https://, a host, "
    assert str(caught.value) == f"{told}and no more than a port and a path"


@pytest.mark.parametrize("name", ["batch_seconds", "cached_content_seconds", "max_blocks"])
def test_tuning_has_bounds_too(name: str) -> None:
    """A batch that ends behind the year 9999 was a 500."""
    for wrong in ("1e17", "0", "-1", '"x"', "NaN"):
        with pytest.raises(SettingsError, match=f"^HOLDFAST_TUNING: {name}: .*"):
            load({**NEEDED, "HOLDFAST_TUNING": f'{{"{name}": {wrong}}}'})
    longest = load({**NEEDED, "HOLDFAST_TUNING": f'{{"{name}": 315360000}}'}).tuning
    assert getattr(longest, name) == 10 * 365 * 86_400


@pytest.mark.parametrize("wrong", ["x", "[]", '{"no_such": 1}', "[" * 100_000])
def test_tuning_is_an_object_of_known_names(wrong: str) -> None:
    with pytest.raises(SettingsError, match=r"^HOLDFAST_TUNING: "):
        load({**NEEDED, "HOLDFAST_TUNING": wrong})
