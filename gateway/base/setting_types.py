"""Types of settings. What passes here does not fail later: numbers have a bound, texts a form."""

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, SecretStr

# Seconds. A time that is so far ahead still has a date.
TEN_YEARS = 10 * 365 * 86_400.0
ONE_DAY = 86_400

Count = Annotated[int, Field(le=1_000_000_000)]
Bytes = Annotated[int, Field(le=1 << 50)]
Days = Annotated[float, Field(le=TEN_YEARS)]
"""Seconds that may be many days."""
Pause = Annotated[float, Field(le=ONE_DAY)]
"""Seconds that something or somebody waits."""

_DRIVERS = ("sqlite+aiosqlite://", "postgresql+psycopg://")


def _is_not_blank(secret: SecretStr) -> SecretStr:
    if not secret.get_secret_value().strip():
        raise ValueError("must not be empty")
    return secret


def _fits_in_a_header(secret: SecretStr) -> SecretStr:
    text = _is_not_blank(secret).get_secret_value()
    if text != text.strip() or not text.isascii() or not text.isprintable():
        raise ValueError("must be printable ASCII without blanks at its ends")
    return secret


def _has_a_short_path(path: Path) -> Path:
    try:
        path.exists()
    except OSError as error:
        raise ValueError(error.strerror) from None
    return path


def _can_be_read(path: Path) -> Path:
    try:
        path.open("rb").close()
    except OSError as error:
        raise ValueError(f"{error.strerror}: {path}") from None
    return path


def _is_database(url: str) -> str:
    if not url:
        return url
    if not url.startswith(_DRIVERS):
        raise ValueError("must start with sqlite+aiosqlite:// or postgresql+psycopg://")
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError:
        raise ValueError("must be a URL with a host, and a port up to 65535") from None
    if url.startswith(_DRIVERS[0]) and parts.path in ("", "/", "/:memory:"):
        raise ValueError("must name a file: sqlite+aiosqlite:///PATH")
    return url


Secret = Annotated[SecretStr, AfterValidator(_is_not_blank)]
HeaderSecret = Annotated[SecretStr, AfterValidator(_fits_in_a_header)]
Directory = Annotated[Path, AfterValidator(_has_a_short_path)]
ReadableFile = Annotated[Path, AfterValidator(_can_be_read)]
DatabaseUrl = Annotated[str, AfterValidator(_is_database)]
