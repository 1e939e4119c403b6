"""When the sample month's turns begin: by hour and weekday, in talks with pauses."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from gateway.sample.cast import APPS, App, Rhythm

DAYS = 30
_HOURS = DAYS * 24
# The shares of a talk's pauses that are short breaks, and that are long ones.
_COFFEE, _MEETING = 0.06, 0.012
_TOKEN_SECONDS = 0.036
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """The beginning of a talk's turn number `turn` (from 0), after `compactions` of its history."""

    ms: int
    app: App
    prompt: int
    talk: int
    turn: int
    compactions: int
    key: str


def arrivals(until: datetime, num_turns: int, chance: random.Random) -> list[Arrival]:
    """About `num_turns` arrivals in the 30 days before `until`, in order of time."""
    made: list[Arrival] = []
    for app in APPS:
        made += _of_app(app, until, int(num_turns * app.share), chance)
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


def _of_app(app: App, until: datetime, count: int, chance: random.Random) -> list[Arrival]:
    first = until - timedelta(days=DAYS)
    hours = [first + timedelta(hours=hour) for hour in range(_HOURS)]
    # The team grows: the last day has a third more turns than the first.
    weights = [
        weight(app.rhythm, hour) * (1 + number / _HOURS / 3) for number, hour in enumerate(hours)
    ]
    made: list[Arrival] = []
    last_ms, talk = int(until.timestamp() * 1000), 0
    while len(made) < count:
        start = chance.choices(hours, weights)[0] + timedelta(hours=chance.random())
        talk += 1
        turns = _talk(app, int(start.timestamp() * 1000), talk, chance)
        made += [turn for turn in turns if turn.ms < last_ms]
    return made[:count]


def _talk(app: App, ms: int, talk: int, chance: random.Random) -> Iterator[Arrival]:
    prompt = min(int(chance.expovariate(2.2 / app.num_prompts)), app.num_prompts - 1)
    key = chance.choice(app.keys)
    length = 1 if app.talk_turns == 1 else 1 + int(chance.expovariate(1 / (app.talk_turns - 1)))
    compactions = 0
    for turn in range(length):
        if turn and turn % 30 == 0:
            compactions += 1
        yield Arrival(ms, app, prompt, talk, turn, compactions, key)
        ms += int(_pause(app, chance) * 1000)


def _pause(app: App, chance: random.Random) -> float:
    kind = chance.random()
    if kind < _MEETING:
        return chance.uniform(3700, 9000)
    if kind < _MEETING + _COFFEE:
        return chance.uniform(320, 2400)
    # No pause is shorter than the longest answer.
    return 2.0 + app.answer[1] * _TOKEN_SECONDS + chance.expovariate(1 / app.pause_seconds)


def day_of(ms: int, until: datetime) -> int:
    """The day of the month, from 0, of a moment."""
    first = int(until.timestamp() * 1000) - DAYS * _DAY_MS
    return (ms - first) // _DAY_MS


def start_of(until: datetime, day: int, hour: float) -> int:
    """The moment (ms) of an hour (UTC) of one of the month's days."""
    first = (until - timedelta(days=DAYS)).astimezone(UTC)
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
    return int((midnight + timedelta(days=day, hours=hour)).timestamp() * 1000)
