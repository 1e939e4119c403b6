"""All settings of the gateway. They are read once at start. A bad value stops the start with an
error that names the variable.

Any variable NAME may come from a file instead. Then NAME_FILE is the path of the file.
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
# ASCII without blanks, and a path without a query.
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
    """One engine of HOLDFAST_ENGINES. Ledger rows, metrics and the admin API call the engine by
    this name. The name depends on the engine's own entry alone, not on the order of the list."""

    name: str
    url: str

    @classmethod
    def parse(cls, text: str) -> "EnginePlace":
        """Read `name=URL`, or a URL alone. The name of an engine without one is made of its URL's
        host, port and path."""
        if not text.startswith(("http://", "https://")):
            name, _, url = text.partition("=")
            return cls(name.strip(), url.strip())
        place = text.partition("://")[2]
        return cls(_NOT_IN_NAMES.sub("-", place)[:ENGINE_NAME_CHARACTERS].rstrip("-"), text)

    @property
    def is_name(self) -> bool:
        return bool(_ENGINE_NAME.fullmatch(self.name))


def is_engine_url(url: str) -> bool:
    """Whether an engine may have this URL. The URL's path goes into request lines, and the URL is
    logged."""
    try:
        parts = urlsplit(url)
        host = (parts.hostname or "").encode("idna")
        port = parts.port
    except ValueError:  # brackets, a port above 65,535, a label above 63 characters
        return False
    return _URL.fullmatch(url) is not None and bool(host) and port != 0


def is_source(entry: str) -> bool:
    """Whether an entry of HOLDFAST_ENGINES is no engine, but says where engines are found."""
    return entry.startswith(("kubernetes://", "dns://"))


def engine_list(text: str) -> tuple[str, ...]:
    """The entries of HOLDFAST_ENGINES. Raise ValueError for a wrong entry. The message names the
    entry by its number, because a URL may have a password in it."""
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
"""A number of seconds that somebody waits."""


class DatabaseSettings(BaseModel):
    """The settings that a migration needs. Every other class of settings has these too."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    data: Annotated[Path, AfterValidator(_has_a_short_path)] = Path("data")
    """Directory of the journal and the default database"""
    database_url: DatabaseUrl = ""
    """SQLAlchemy URL of the ledger (`sqlite+aiosqlite://` or `postgresql+psycopg://`); empty: an
    SQLite file in HOLDFAST_DATA"""

    @property
    def ledger_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.data / 'ledger.db'}"

    @property
    def sqlite_path(self) -> Path | None:
        """The path of the ledger; None if the ledger is no SQLite file."""
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
    """Path of a price sheet that replaces the shipped price sheet"""
    hosted_prices: ReadableFile | None = None
    """Path of a file of published prices, for comparison, that replaces the shipped file"""


class Settings(PriceFiles):
    api_key: HeaderSecret | None = None
    """API key of the workspace `default`; the key is created at the start if it is absent"""
    admin_key: HeaderSecret | None = None
    """Key of the admin API; unset: only keys of scope `admin` may use it"""
    engines: tuple[str, ...] = ("http://127.0.0.1:8100",)
    """Engines, separated by commas: each is a URL or `name=URL`. An engine without a name is called
    by its URL's host, port and path. `kubernetes://NAMESPACE/SERVICE` stands for all endpoints of a
    service, and `dns://HOST:PORT` for all addresses of a name"""
    engine_secret: HeaderSecret
    """Secret shared with the engines, of 16 characters or more"""
    master_secret: Secret
    """Secret from which the cache scope of each workspace is derived"""
    host: str = "127.0.0.1"
    """Address to listen on"""
    port: int = Field(default=8080, ge=0, le=65535)
    """Port to listen on"""
    models: ReadableFile | None = None
    """Path of a models.toml that replaces the shipped file"""
    claude_alias: bool | str = False
    """The model that `claude-*` ids stand for: a model's id, or `true` for the default model. The
    default model is the one that HOLDFAST_MODELS names, or else the first that was served"""
    remove_nonces: bool = True
    """Whether known nonces of clients, such as the billing line of coding agents, are kept out of
    prompts"""
    unreadable: Literal["placeholder", "refuse"] = "placeholder"
    """What happens to images, PDFs and sounds that the model can't read. `placeholder`: the prompt
    says in their place what is missing, and the answer lists them in `holdfast.ignored`. `refuse`:
    the request is refused with a 400"""
    auto_cache: AutoCacheMode = "conversation"
    """Where breakpoints are added to requests that mark nothing, in dialects without markers of
    their own. `off`: nowhere. `prefix`: behind the tools and the system prompt. `conversation`:
    behind the last turn too. What these breakpoints write gets no lease. A workspace or a key may
    have its own policy, and what the breakpoints of such a policy write gets a lease"""
    auto_cache_ttl: AutoCacheTtl = "5m"
    """How long the writes of HOLDFAST_AUTO_CACHE can be read at most: `5m` or `1h`. Each use begins
    the time again"""
    auto_cache_messages: bool = False
    """Whether HOLDFAST_AUTO_CACHE also holds for requests of the Messages API that mark nothing.
    Frameworks for agents that use no `cache_control` send such requests. Their answers' usage then
    has writes"""
    response_days: int = Field(default=0, ge=0, le=36_500)
    """For how many days OpenAI's responses and conversations, and Google's interactions, are kept,
    encrypted, so that clients can go on with them. With 0 they are kept only for workspaces with
    `keep_days`"""
    queue_seconds: float = Field(default=30.0, ge=0, le=600)
    """How many seconds a turn may wait for an engine with room; 0: it is refused at once"""
    routing_load_weight: float = Field(default=0.5, ge=0, le=10)
    """How much a token of an engine's recent load above the fair share counts in routing, in tokens
    of prefill"""
    body_limit_bytes: int = Field(default=32 << 20, ge=1024, le=1 << 50)
    """Largest request body, in bytes"""
    batch_concurrency: int = Field(default=8, ge=1, le=1_000_000)
    """How many rows of batches a gateway has at engines at one time, at most"""
    log_level: str = "info"
    """Level of the log: debug, info, warning or error"""
    access_log: bool = False
    """Whether a log line is written for each HTTP response, and for each turn when it ends"""
    metrics_workspaces: int = Field(default=0, ge=0, le=1000)
    """How many workspaces `/metrics` names, each with its own series. All other workspaces together
    are `other`. `/metrics` needs no key, so keep it from clients before you set this above 0"""
    vllm_metrics: bool = True
    """Whether `/metrics` has some of its counts also under the names of vLLM's metrics. Boards,
    autoscalers, endpoint pickers and planners read these names"""
    traces: bool = False
    """Whether spans of turns are sent to an OpenTelemetry collector, which needs the extra `otel`.
    The standard OTEL_* variables name the collector"""
    drain_seconds: Pause = 0.0
    """For how many seconds after SIGTERM the gateway still takes requests while it says that it is
    not ready. A load balancer needs this time to see that"""
    grace_seconds: int = Field(default=30, ge=0, le=_ONE_DAY)
    """How many seconds running turns have to end after HOLDFAST_DRAIN_SECONDS. Turns that still run
    then are cut off"""
    journal_max_bytes: int = Field(default=JOURNAL_MAX_BYTES, ge=1 << 20, le=1 << 50)
    """The size of the journal, in bytes, beyond which new turns are refused. An eighth more, 64 MiB
    at most, is kept free on top of it for closing open turns"""
    tuning: Tuning = Tuning()
    """The bounds and times of `bounds.py` that differ from their defaults, as a JSON object such as
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
    """Read all settings. Raise SettingsError with every problem at once."""
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
