"""The sample month's engines and applications, read out of cast.toml."""

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from engine.protocol import Ttl

Rhythm = Literal["office", "night", "weekend", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """One application. Lengths are ranges in tokens."""

    workspace: str
    name: str
    model: str
    # The application's share of the month's turns.
    share: float
    rhythm: Rhythm
    system_tokens: int
    question: tuple[int, int]
    answer: tuple[int, int]
    # The TTL of the mark on the system prompt. Empty: the system prompt has no mark.
    system_ttl: Ttl | Literal[""] = "5m"
    # The TTL of the mark at a turn's end.
    turn_ttl: Ttl | None = None
    num_tools: int = 0
    num_prompts: int = 1
    # The turns of a talk, on average. Each sends the earlier ones again.
    talk_turns: int = 1
    # Between two turns of a talk.
    pause_seconds: float = 45.0
    # The prompt begins with the time, so no two prompts are alike.
    stamps: bool = False
    compares: bool = False
    dialect: Literal["anthropic", "openai"] = "anthropic"
    keys: tuple[str, ...] = ("production",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An engine: its model, its speed, its first day in the month, and its restarts.

    A restart is the day and the hour (UTC) at which the engine ends, and its minutes of downtime.
    """

    name: str
    serves: str
    prefill_tokens_per_second: float
    decode_seconds: float
    first_day: int = 0
    restarts: tuple[tuple[int, float, float], ...] = ()


PRICED_AS = {"general-8b": "reference", "coder-32b": "reference", "general-8b-preview": None}
ENGINE_MODEL = {
    "general-8b": "general-8b",
    "general-8b-preview": "general-8b",
    "coder-32b": "coder-32b",
}

_CAST = tomllib.loads(Path(__file__).with_name("cast.toml").read_text("utf-8"))
MACHINES = msgspec.convert(_CAST["machines"], tuple[Machine, ...])
APPS = msgspec.convert(_CAST["apps"], tuple[App, ...])
