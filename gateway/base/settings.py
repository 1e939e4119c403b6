"""All settings of the gateway. Read once at start; a bad value stops the start and names itself.

Any variable NAME may come from a file instead: set NAME_FILE to its path.
"""

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    SecretStr,
    ValidationError,
    field_validator,
)

from gateway.base.bounds import Tuning
from gateway.structs.fleet import AutoCacheMode, AutoCacheTtl

ENGINE_NAME_CHARACTERS = 64
URL_MUST_BE = "must be http:// or https://, a host, and no more than a port and a path"
_ENGINE_NAME = re.compile(r"[A-Za-z0-9\[][A-Za-z0-9._:\[\]-]{0,63}")
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._:\[\]-]")
# ASCII without blanks; the path without a query.
_URL = re.compile(
    r"https?://(?:\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._~-]+)(?::[0-9]{1,5})?(?:/[!\"$->@-~]*)?"
)


_PATH = r"(?:/[A-Za-z0-9._~/-]*)?"
_SOURCE = re.compile(
    r"kubernetes://[a-z0-9-]{1,63}/[a-z0-9-]{1,63}(?::[a-z0-9-]{1,63})?"
    rf"{_PATH}(?:\?api=https?://[A-Za-z0-9.:_\[\]-]+)?"
    rf"|dns://[A-Za-z0-9._-]{{1,253}}:[0-9]{{1,5}}{_PATH}"
)


class EnginePlace(NamedTuple):
    """One engine of HOLDFAST_ENGINES. Ledger rows, metrics and the admin API call it by this name,
    which depends on its own entry alone: the list's order means nothing."""

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> "EnginePlace":
        """Read `name=URL`, or a URL alone. An engine without a name is called by its host and port
        (and path)."""
        if not text.startswith(("http://", "https://")):
            name, _, url = text.partition("=")
            return cls(name.strip(), url.strip())
        place = text.partition("://")[2]
        return cls(_NOT_IN_NAMES.sub("-", place)[:ENGINE_NAME_CHARACTERS].rstrip("-"), text)

    @property
    def is_name(self) -> bool:
        return bool(_ENGINE_NAME.fullmatch(self.name))


def is_engine_url(url: str) -> bool:
    """Whether an engine may have this URL. Its path goes into request lines, and it is logged."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        port = parts.port
    except ValueError:  # brackets, a port above 65,535, a label above 63 characters
        return False
    return _URL.fullmatch(url) is not None and bool(host) and port != 0


def is_source(entry: str) -> bool:
    """Whether an entry of HOLDFAST_ENGINES says where engines are found, and is none itself."""
    return entry.startswith(("kubernetes://", "dns://"))


def engine_list(text: str) -> tuple[str, ...]:
    """The entries of HOLDFAST_ENGINES. Raise ValueError for a wrong one. The message names the
    entry by its number, because a URL may have a password."""
    entries = tuple(entry.strip().rstrip("/") for entry in text.split(",") if entry.strip())
    if not entries:
        raise ValueError("must be http(s) URLs, or name=URL, separated by commas")
    for number, entry in enumerate(entries, 1):
        if is_source(entry) and not _SOURCE.fullmatch(entry):
            raise ValueError(
                f"entry {number} must be kubernetes://NAMESPACE/SERVICE, with :PORTNAME, a path and"
                " ?api=URL if need be, or dns://HOST:PORT and a path"
            )
    places = [EnginePlace.parse(entry) for entry in entries if not is_source(entry)]
    for number, place in enumerate(places, 1):
        if not is_engine_url(place.url):
            raise ValueError(f"URL {number} {URL_MUST_BE}")
        if not place.is_name:
            raise ValueError(
                f"name {number} must be 1 to {ENGINE_NAME_CHARACTERS} letters, digits and any of"
                " . _ : [ ] -, and begin with a letter or digit"
            )
    for names in ([place.url for place in places], [place.name for place in places]):
        if len(set(names)) != len(names):
            raise ValueError("names an engine twice")
    return entries


PREFIX = "HOLDFAST_"
JOURNAL_MAX_BYTES = 1 << 30
_DRIVERS = ("sqlite+aiosqlite://", "postgresql+psycopg://")
_ONE_DAY = 86_400

SettingsT = TypeVar("SettingsT", bound="DatabaseSettings")


class SettingsError(Exception):
    """One line for each setting that is missing or wrong."""


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
ReadableFile = Annotated[Path, AfterValidator(_can_be_read)]
DatabaseUrl = Annotated[str, AfterValidator(_is_database)]
Pause = Annotated[float, Field(ge=0, le=_ONE_DAY)]
"""Seconds that something or somebody waits."""


class DatabaseSettings(BaseModel):
    """The settings that a migration needs. The other settings build on them."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    data: Annotated[Path, AfterValidator(_has_a_short_path)] = Path("data")
    """Directory of the journal and the default database"""
    database_url: DatabaseUrl = ""
    """SQLAlchemy URL of the ledger (`sqlite+aiosqlite://` or `postgresql+psycopg://`); empty means
    SQLite under HOLDFAST_DATA"""

    @property
    def ledger_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.data / 'ledger.db'}"

    @property
    def sqlite_path(self) -> Path | None:
        """The path of the ledger, if it is a SQLite file."""
        prefix = "sqlite+aiosqlite:///"
        path = self.ledger_url.removeprefix(prefix)
        return Path(path) if self.ledger_url.startswith(prefix) and path else None


# As pydantic reads a bool.
_SWITCHES = {
    **dict.fromkeys(("true", "1", "yes", "on", "y", "t"), True),
    **dict.fromkeys(("false", "0", "no", "off", "n", "f"), False),
}


class PriceFiles(DatabaseSettings):
    """Where prices come from."""

    prices: ReadableFile | None = None
    """Path of a price sheet that replaces the shipped one"""
    hosted_prices: ReadableFile | None = None
    """Path of published prices, for comparison, that replace the shipped ones"""


class Settings(PriceFiles):
    api_key: HeaderSecret | None = None
    """API key of the workspace `default`, created when absent"""
    admin_key: HeaderSecret | None = None
    """Key of the admin API; unset leaves it to keys of scope `admin`"""
    engines: tuple[str, ...] = ("http://127.0.0.1:8100",)
    """Engine URLs, or `name=URL`, separated by commas; without a name an engine is called by its
    URL's host and port. `kubernetes://NAMESPACE/SERVICE` follows a service's endpoints, and
    `dns://HOST:PORT` a name's addresses"""
    engine_secret: HeaderSecret
    """Secret shared with the engines, which want 16 characters or more"""
    master_secret: Secret
    """Secret from which each workspace's cache scope is derived"""
    host: str = "127.0.0.1"
    """Address to listen on"""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on"""
    models: ReadableFile | None = None
    """Path of a models.toml that replaces the shipped one"""
    claude_alias: bool | str = False
    """What `claude-*` ids mean: a model's id, or with `true` the default model, which is the first
    that was served unless HOLDFAST_MODELS names one"""
    remove_nonces: bool = True
    """Whether known client nonces (the billing line of coding agents) are kept out of prompts"""
    unreadable: Literal["placeholder", "refuse"] = "placeholder"
    """What becomes of images, PDFs and sounds that the model can't read: a `placeholder` in the
    prompt that says what is missing, told in `holdfast.ignored`, or `refuse` with a 400"""
    auto_cache: AutoCacheMode = "conversation"
    """Where breakpoints are added to requests that mark nothing, in dialects without markers of
    their own: nowhere (`off`), behind tools and system prompt (`prefix`), also behind the last turn
    (`conversation`); what they write gets no lease; workspaces and keys may have a policy of their
    own, which leases"""
    auto_cache_ttl: AutoCacheTtl = "5m"
    """For how long that can be read at most: 5m or 1h, renewed by each use"""
    auto_cache_messages: bool = False
    """Whether the same is done for requests of the Messages API that mark nothing, as of agents'
    frameworks that speak it without `cache_control`; their usage then has writes"""
    response_days: int = Field(default=0, ge=0, le=36_500)
    """For how many days responses and conversations of OpenAI's API, and Google's interactions, are
    kept, encrypted, so that clients can go on with them; 0 keeps those of workspaces with
    `keep_days` alone"""
    queue_seconds: float = Field(default=30.0, ge=0, le=600)
    """For how many seconds a turn may wait for an engine with room; 0 refuses it at once"""
    routing_load_weight: float = Field(default=0.5, ge=0, le=10)
    """What a token of recent load above the fair share costs, in tokens of prefill"""
    body_limit_bytes: int = Field(default=32 << 20, ge=1024, le=1 << 50)
    """Largest request body, in bytes"""
    batch_concurrency: int = Field(default=8, ge=1, le=1_000_000)
    """Most rows of batches that a gateway has at engines at one time"""
    log_level: str = "info"
    """debug, info, warning or error"""
    access_log: bool = False
    """Write a log line for each HTTP response, and one for each turn at its end"""
    metrics_workspaces: int = Field(default=0, ge=0, le=1000)
    """How many workspaces `/metrics` names, each with series of its own; the others are `other`.
    `/metrics` needs no key: keep it from clients before this is more than 0"""
    vllm_metrics: bool = True
    """Whether `/metrics` has some of its counts by the names of vLLM's metrics too, for boards,
    autoscalers, endpoint pickers and planners that read those"""
    traces: bool = False
    """Send spans of turns to an OpenTelemetry collector; needs the extra `otel`. The standard
    OTEL_* variables say where to"""
    drain_seconds: Pause = 0.0
    """For how many seconds after SIGTERM the gateway still takes requests while it is not ready any
    more, so that a load balancer can see that"""
    grace_seconds: int = Field(default=30, ge=0, le=_ONE_DAY)
    """How many seconds running turns then have to end; the others are cut off"""
    journal_max_bytes: int = Field(default=JOURNAL_MAX_BYTES, ge=1 << 20, le=1 << 50)
    """Bytes of the journal beyond which new turns are refused; an eighth more (64 MiB at most) is
    kept free for closing those that are open"""
    tuning: Tuning = Tuning()
    """Bounds and times of `bounds.py` that differ from their defaults, as a JSON object such as
    `{"stall_seconds": 120}`"""

    @field_validator("engines", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return engine_list(value) if isinstance(value, str) else value

    @field_validator("claude_alias", mode="before")
    @classmethod
    def _switch_or_id(cls, value: object) -> object:
        return _SWITCHES.get(value.lower(), value) if isinstance(value, str) else value

    @field_validator("tuning", mode="before")
    @classmethod
    def _parsed(cls, value: object) -> object:
        try:
            return json.loads(value) if isinstance(value, str) else value
        except (ValueError, RecursionError):
            raise ValueError("must be a JSON object") from None

    @field_validator("log_level")
    @classmethod
    def _known_level(cls, level: str) -> str:
        if level.lower() not in {"debug", "info", "warning", "error"}:
            raise ValueError("must be debug, info, warning or error")
        return level.lower()


def load(environ: Mapping[str, str] | None = None) -> Settings:
    """Read all settings, or raise SettingsError with every problem at once."""
    return _load(Settings, os.environ if environ is None else environ)


def load_database(environ: Mapping[str, str] | None = None) -> DatabaseSettings:
    return _load(DatabaseSettings, os.environ if environ is None else environ)


def load_price_files(environ: Mapping[str, str] | None = None) -> PriceFiles:
    return _load(PriceFiles, os.environ if environ is None else environ)


def _load(kind: type[SettingsT], environ: Mapping[str, str]) -> SettingsT:
    values: dict[str, str] = {}
    problems: list[str] = []
    for name in kind.model_fields:
        variable = PREFIX + name.upper()
        value = environ.get(variable)
        path = environ.get(f"{variable}_FILE")
        if value:
            values[name] = value
        elif path:
            try:
                values[name] = Path(path).read_text(encoding="utf-8").strip()
            except OSError as error:
                problems.append(f"{variable}_FILE: {error.strerror}: {path}")
            except UnicodeDecodeError:
                problems.append(f"{variable}_FILE: is not UTF-8: {path}")
            else:
                if not values[name]:
                    problems.append(f"{variable}_FILE: is empty: {path}")
    try:
        settings = kind.model_validate(values)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            field, *inner = map(str, problem["loc"])
            reason = ": ".join([*inner, problem["msg"].removeprefix("Value error, ")])
            if problem["type"] == "missing":
                reason = f"is not set; it is needed: {kind.model_fields[field].description}"
            problems.append(f"{PREFIX}{field.upper()}: {reason}")
    else:
        if not problems:
            return settings
    raise SettingsError("\n".join(problems))
