"""All settings of the gateway. Read once at start; a bad value stops the start and names itself.

Any variable NAME may come from a file instead: set NAME_FILE to its path.
"""

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Literal, NamedTuple, TypeVar

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import (
    BaseSettings,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from gateway.admin.structs.fleet import AutoCacheMode, AutoCacheTtl
from gateway.base.bounds import LoadBounds, RequestBounds
from gateway.base.engine_places import engine_list
from gateway.base.setting_types import (
    ONE_DAY,
    Bytes,
    Count,
    DatabaseUrl,
    Days,
    Directory,
    HeaderSecret,
    Pause,
    ReadableFile,
    Secret,
)

PREFIX = "HOLDFAST_"
JOURNAL_MAX_BYTES = 1 << 30
JOURNAL_MIN_BYTES = 1 << 20


SettingsT = TypeVar("SettingsT", bound="DatabaseSettings")


class SettingsError(Exception):
    """One line for each setting that is missing or wrong."""


class Setting(NamedTuple):
    """One row of the documented settings table."""

    name: str
    default: str | None
    description: str


class DatabaseSettings(BaseSettings):
    """The settings that a migration needs. The other settings build on them."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="ignore", frozen=True)

    data: Directory = Field(
        default=Path("data"), description="Directory of the journal and the default database"
    )
    database_url: DatabaseUrl = Field(
        default="",
        description="SQLAlchemy URL of the ledger (`sqlite+aiosqlite://` or `postgresql+psycopg://`);"
        " empty means SQLite under HOLDFAST_DATA",
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Take values from `load` only, so that one place reads the environment."""
        return (init_settings,)

    @property
    def ledger_url(self) -> str:
        return self.database_url or f"sqlite+aiosqlite:///{self.data / 'ledger.db'}"

    @property
    def sqlite_path(self) -> Path | None:
        """The path of the ledger, if it is a SQLite file."""
        prefix = "sqlite+aiosqlite:///"
        path = self.ledger_url.removeprefix(prefix)
        return Path(path) if self.ledger_url.startswith(prefix) and path else None


class PriceFiles(DatabaseSettings):
    """Where prices come from."""

    prices: ReadableFile | None = Field(
        default=None, description="Path of a price sheet that replaces the shipped one"
    )
    hosted_prices: ReadableFile | None = Field(
        default=None,
        description="Path of published prices, for comparison, that replace the shipped ones",
    )


class Settings(PriceFiles, RequestBounds, LoadBounds):
    api_key: HeaderSecret | None = Field(
        default=None, description="API key of the workspace `default`, created when absent"
    )
    admin_key: HeaderSecret | None = Field(
        default=None, description="Key of the admin API; unset leaves it to keys of scope `admin`"
    )
    keys_stale_seconds: Days = Field(
        default=3600.0,
        gt=0,
        description="For how many seconds known API keys still work while the database is away",
    )
    engines: Annotated[tuple[str, ...], NoDecode] = Field(
        default=("http://127.0.0.1:8100",),
        description="Engine URLs, or `name=URL`, separated by commas; without a name an engine is"
        " called by its URL's host and port",
    )
    engine_down_seconds: Pause = Field(
        default=30.0,
        ge=0,
        description="After how many seconds without an answer an engine is down; before, turns wait"
        " for it as for a full one. One that refuses connections is down at once",
    )
    routing_events: bool = Field(
        default=True,
        description="Whether routing follows the engines' events; otherwise it learns from their"
        " answers alone",
    )
    routing_load_weight: float = Field(
        default=0.5,
        ge=0,
        le=10,
        description="What a token of recent load above the fair share costs, in tokens of prefill",
    )
    routing_fade_seconds: Days = Field(
        default=600.0, gt=0, description="Time constant with which recent load fades, in seconds"
    )
    routing_host_cost: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="What copying a token back from host memory costs, in tokens of prefill",
    )
    routing_delay_cost: float = Field(
        default=0.25,
        ge=0,
        le=1000,
        description="What a token of prefill costs each answer that runs beside it, in computed "
        "tokens: from where on a long new prompt goes to an engine with the role `prefill` first",
    )
    queue_seconds: float = Field(
        default=30.0,
        ge=0,
        le=600,
        description="For how many seconds a turn may wait for an engine with room; 0 refuses it at"
        " once",
    )
    engine_queue_tokens: Count = Field(
        default=16_384,
        ge=1,
        description="Tokens of prefill that may wait at one engine; further turns wait at the"
        " gateway, in fair order",
    )
    engine_secret: HeaderSecret = Field(
        description="Secret shared with the engines, which want 16 characters or more"
    )
    master_secret: Secret = Field(
        description="Secret from which each workspace's cache scope is derived"
    )
    host: str = Field(default="127.0.0.1", description="Address to listen on")
    port: int = Field(default=8080, ge=0, le=65535, description="Port to listen on")
    models: ReadableFile | None = Field(
        default=None, description="Path of a models.toml that replaces the shipped one"
    )
    claude_alias: bool = Field(
        default=False, description="Whether `claude-*` ids mean the default model"
    )
    remove_nonces: bool = Field(
        default=True,
        description="Whether known client nonces (the billing line of coding agents) are kept out"
        " of prompts",
    )
    unreadable: Literal["placeholder", "refuse"] = Field(
        default="placeholder",
        description="What becomes of images, PDFs and sounds, which no model here reads: a"
        " `placeholder` in the prompt that says what is missing, told in `holdfast.ignored`, or"
        " `refuse` with a 400",
    )
    auto_cache: AutoCacheMode = Field(
        default="conversation",
        description="What is held of requests that mark nothing, in dialects without markers of"
        " their own: nothing (`off`), tools and system prompt (`prefix`), also the last turn"
        " (`conversation`); workspaces and keys may have a policy of their own",
    )
    auto_cache_ttl: AutoCacheTtl = Field(
        default="5m", description="For how long it is held: 5m or 1h, renewed by each use"
    )
    auto_cache_messages: bool = Field(
        default=False,
        description="Whether the same is held of requests of the Messages API that mark nothing, as"
        " of agents' frameworks that speak it without `cache_control`; their usage then has writes",
    )
    log_level: str = Field(default="info", description="debug, info, warning or error")
    access_log: bool = Field(
        default=False,
        description="Write a log line for each HTTP response, and one for each turn at its end",
    )
    metrics_workspaces: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="How many workspaces `/metrics` names, each with series of its own; the others"
        " are `other`. `/metrics` needs no key: keep it from clients before this is more than 0",
    )
    traces: bool = Field(
        default=False,
        description="Send spans of turns to an OpenTelemetry collector; needs the extra `otel`."
        " The standard OTEL_* variables say where to",
    )
    request_seconds: Pause = Field(
        default=30.0,
        gt=0,
        description="For how many seconds a request's headers may take to come, and then its body;"
        " a body gets one more for each 16 KiB of it",
    )
    stall_seconds: Pause = Field(
        default=60.0,
        gt=0,
        description="After how many seconds a client that does not read its answer is cut off",
    )
    drain_seconds: Pause = Field(
        default=0.0,
        ge=0,
        description="For how many seconds after SIGTERM the gateway still takes requests while it"
        " is not ready any more, so that a load balancer can see that",
    )
    grace_seconds: int = Field(
        default=30,
        ge=0,
        le=ONE_DAY,
        description="How many seconds running turns then have to end; the others are cut off",
    )
    journal_max_bytes: Bytes = Field(
        default=JOURNAL_MAX_BYTES,
        ge=JOURNAL_MIN_BYTES,
        description="Bytes of the journal beyond which new turns are refused; an eighth more"
        " (64 MiB at most) is kept free for closing those that are open",
    )

    @property
    def request_bounds(self) -> RequestBounds:
        return RequestBounds.model_validate(
            self.model_dump(include=set(RequestBounds.model_fields))
        )

    @property
    def load_bounds(self) -> LoadBounds:
        return LoadBounds(**{name: getattr(self, name) for name in LoadBounds.model_fields})

    @field_validator("engines", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return engine_list(value) if isinstance(value, str) else value

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


def misspelt(environ: Mapping[str, str]) -> list[str]:
    """One line for each variable that is no setting but is called almost like one.

    Other names with the prefix may be meant for other programs, so nothing is said of them.
    """
    known = [PREFIX + name.upper() for name in Settings.model_fields]
    found = []
    for variable in sorted(environ):
        name = variable.removesuffix("_FILE")
        if name.startswith(PREFIX) and variable not in known and name not in known:
            close = get_close_matches(name, known, n=1, cutoff=0.9)
            found += [f"{variable} is no setting: did you mean {one}?" for one in close]
    return found


def table() -> list[Setting]:
    """Name, default and description of every setting, for the documentation tests."""
    rows = []
    for name, field in Settings.model_fields.items():
        default = None if field.is_required() else field.default
        shown = ",".join(default) if isinstance(default, tuple) else default
        rows.append(
            Setting(
                PREFIX + name.upper(),
                None
                if shown is None
                else str(shown).lower()
                if isinstance(shown, bool)
                else str(shown),
                field.description or "",
            )
        )
    return rows


def _load(kind: type[SettingsT], environ: Mapping[str, str]) -> SettingsT:
    given: dict[str, str] = {}
    problems: list[str] = []
    for name in kind.model_fields:
        variable = PREFIX + name.upper()
        if value := environ.get(variable):
            given[name] = value
        elif path := environ.get(f"{variable}_FILE"):
            try:
                given[name] = Path(path).read_text(encoding="utf-8").strip()
            except OSError as error:
                problems.append(f"{variable}_FILE: {error.strerror}: {path}")
            except UnicodeDecodeError:
                problems.append(f"{variable}_FILE: is not UTF-8: {path}")
            else:
                if not given[name]:
                    problems.append(f"{variable}_FILE: is empty: {path}")
    try:
        settings = kind.model_validate(given)
    except ValidationError as error:
        for problem in error.errors(include_url=False, include_input=False):
            field = str(problem["loc"][0])
            told = problem["msg"].removeprefix("Value error, ")
            if problem["type"] == "missing":
                told = f"is not set; it is needed: {kind.model_fields[field].description}"
            problems.append(f"{PREFIX}{field.upper()}: {told}")
    else:
        if not problems:
            return settings
    raise SettingsError("\n".join(problems))
