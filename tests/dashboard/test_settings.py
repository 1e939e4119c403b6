"""The dashboard as a program: what it refuses to start with."""

from collections.abc import Iterator

import pytest

from dashboard.__main__ import main
from dashboard.settings import Settings, settings


@pytest.fixture(autouse=True)
def read_anew() -> Iterator[None]:
    settings.cache_clear()
    yield
    settings.cache_clear()


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("HOST", "9" * 300),
        *(("GATEWAY_URL", url) for url in ("http://127.0.0.1:8080 ", "http://", "http://[::1")),
        ("PORT", "0"),
        ("SESSION_HOURS", "inf"),
        *(("TRUSTED_PROXIES", proxy) for proxy in ("*", "proxy", "10.0.0.0/33")),
    ],
)
def test_a_wrong_setting_ends_the_start_and_is_named(
    name: str, wrong: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(f"DASHBOARD_{name}", wrong)
    assert main([]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"dashboard: DASHBOARD_{name}: ")
    assert len(error.splitlines()) == 1 and "Value error" not in error


def test_an_empty_variable_counts_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty DASHBOARD_HOST was every address of the machine."""
    for name in Settings.model_fields:
        monkeypatch.setenv(f"DASHBOARD_{name.upper()}", "")
    assert settings().host == "127.0.0.1"


@pytest.mark.parametrize(("word", "status"), [("--help", 0), ("bogus", 2)])
def test_help_is_printed_and_other_words_are_refused(word: str, status: int) -> None:
    """Both started a server."""
    with pytest.raises(SystemExit) as ended:
        main([word])
    assert ended.value.code == status
