"""The sample month's workspaces, their applications, and the engines.

Names are made up. Each application shows one habit. One pays back its writes. One waits longer
between turns than its TTL. One begins its prompt with the time and never reads what it wrote.
"""

import random
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Literal

import msgspec

from engine.protocol import Ttl

Rhythm = Literal["office", "night", "weekend", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """One application. Lengths are ranges in tokens; `share` is its part of the month's turns.

    A talk has `talk_turns` turns on average, `pause_seconds` apart. Each turn sends the earlier
    ones again. `system_ttl` marks the system prompt (empty: nothing does), `turn_ttl` a turn's end.
    With `stamps` the prompt begins with the time, so no two prompts are alike.
    """

    workspace: str
    name: str
    model: str
    share: float
    rhythm: Rhythm
    system_tokens: int
    question: tuple[int, int]
    answer: tuple[int, int]
    system_ttl: Ttl | Literal[""] = "5m"
    turn_ttl: Ttl | None = None
    num_tools: int = 0
    num_prompts: int = 1
    talk_turns: int = 1
    pause_seconds: float = 45.0
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

_CAST = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
MACHINES = msgspec.convert(_CAST["machines"], tuple[Machine, ...])
APPS = msgspec.convert(_CAST["apps"], tuple[App, ...])


DAYS = 30
_HOURS = DAYS * 24
# The shares of a talk's pauses that are short breaks, and that are long ones.
_COFFEE, _MEETING = 0.06, 0.012
_TOKEN_SECONDS = 0.036
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """The beginning of a talk's turn number `turn` (from 0).

    `is_compacted`: a summary replaces the talk's history before it.
    """

    ms: int
    app: App
    prompt: int
    talk: int
    turn: int
    key: str

    @property
    def is_compacted(self) -> bool:
        return self.turn > 0 and self.turn % 30 == 0


def arrivals(until: datetime, num_turns: int, chance: random.Random) -> list[Arrival]:
    """About `num_turns` arrivals in the 30 days before `until`, in order of time."""
    first, last_ms = until - timedelta(days=DAYS), int(until.timestamp() * 1000)
    hours = [first + timedelta(hours=hour) for hour in range(_HOURS)]
    made: list[Arrival] = []
    for app in APPS:
        # The team grows: the last day has a third more turns than the first.
        weights = [weight(app.rhythm, hour) * (1 + n / _HOURS / 3) for n, hour in enumerate(hours)]
        own: list[Arrival] = []
        talk, count = 0, int(num_turns * app.share)
        while len(own) < count:
            start = chance.choices(hours, weights)[0] + timedelta(hours=chance.random())
            talk += 1
            turns = _talk(app, int(start.timestamp() * 1000), talk, chance)
            own += [turn for turn in turns if turn.ms < last_ms]
        made += own[:count]
    return sorted(made, key=lambda each: (each.ms, each.app.name, each.talk))


def weight(rhythm: Rhythm, moment: datetime) -> float:
    """The traffic of the hour that begins at `moment` (UTC), as a share of the busiest hour's."""
    hour, is_weekend = moment.hour, moment.weekday() >= 5
    match rhythm:
        case "night":
            return 1.0 if hour in (1, 2, 3) else 0.0
        case "weekend":
            return (1.0 if 9 <= hour < 15 else 0.02) if is_weekend else 0.01
        case "always":
            return (0.7 if is_weekend else 1.0) * (1.0 if 7 <= hour < 22 else 0.35)
        case "office":
            day = {8: 0.5, 12: 0.6, 17: 0.6, 18: 0.3}.get(hour, 1.0 if 9 <= hour < 17 else 0.03)
            return day * (0.12 if is_weekend else 1.0)


def _talk(app: App, ms: int, talk: int, chance: random.Random) -> Iterator[Arrival]:
    prompt = min(int(chance.expovariate(2.2 / app.num_prompts)), app.num_prompts - 1)
    key = chance.choice(app.keys)
    length = 1 if app.talk_turns == 1 else 1 + int(chance.expovariate(1 / (app.talk_turns - 1)))
    for turn in range(length):
        yield Arrival(ms, app, prompt, talk, turn, key)
        kind = chance.random()
        if kind < _MEETING:
            pause = chance.uniform(3700, 9000)
        elif kind < _MEETING + _COFFEE:
            pause = chance.uniform(320, 2400)
        else:  # no pause is shorter than the longest answer
            answer = 2.0 + app.answer[1] * _TOKEN_SECONDS
            pause = answer + chance.expovariate(1 / app.pause_seconds)
        ms += int(pause * 1000)


def day_of(ms: int, until: datetime) -> int:
    """The day of the month, from 0, of a moment."""
    first = int(until.timestamp() * 1000) - DAYS * _DAY_MS
    return (ms - first) // _DAY_MS


def start_of(until: datetime, day: int, hour: float) -> int:
    """The moment (ms) of an hour (UTC) of one of the month's days."""
    first = (until - timedelta(days=DAYS)).astimezone(UTC)
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
    return int((midnight + timedelta(days=day, hours=hour)).timestamp() * 1000)
