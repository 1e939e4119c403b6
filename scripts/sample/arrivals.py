"""When the sample month's turns come: rhythms of hours and days, talks and their pauses."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from scripts.sample.cast import APPS, App, Rhythm

DAYS = 30
_HOURS = DAYS * 24
# The shares of a talk's pauses that are short breaks, and that are long ones.
_COFFEE = 0.06
_MEETING = 0.012
_TOKEN_SECONDS = 0.036
_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """The beginning of a turn."""

    ms: int
    app: App
    prompt: int
    talk: int
    # Its number in the talk, from 0.
    turn: int
    key: str


def arrivals(until: datetime, num_turns: int, chance: random.Random) -> list[Arrival]:
    """About `num_turns` arrivals in the 30 days before `until`, in order of time."""
    first = until - timedelta(days=DAYS)
    last_ms = int(until.timestamp() * 1000)
    hours = [first + timedelta(hours=hour) for hour in range(_HOURS)]
    month_arrivals: list[Arrival] = []
    for app in APPS:
        # The team grows: the last day has a third more turns than the first.
        weights = [weight(app.rhythm, hour) * (1 + n / _HOURS / 3) for n, hour in enumerate(hours)]
        app_arrivals: list[Arrival] = []
        talk = 0
        count = int(num_turns * app.share)
        while len(app_arrivals) < count:
            start = chance.choices(hours, weights)[0] + timedelta(hours=chance.random())
            talk += 1
            turns = talk_of(app, int(start.timestamp() * 1000), talk, chance)
            app_arrivals += [turn for turn in turns if turn.ms < last_ms]
        month_arrivals += app_arrivals[:count]
    return sorted(month_arrivals, key=lambda arrival: (arrival.ms, arrival.app.name, arrival.talk))


def weight(rhythm: Rhythm, moment: datetime) -> float:
    """The traffic of the hour that begins at `moment` (UTC), as a share of the busiest hour's."""
    hour = moment.hour
    is_weekend = moment.weekday() >= 5
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


def talk_of(app: App, ms: int, talk: int, chance: random.Random) -> Iterator[Arrival]:
    """The turns of one talk, from `ms` on."""
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


def version_on(day: int) -> int:
    """How many deployments have changed the system prompts by that day of the month, from 0."""
    return sum(day >= deployed for deployed in _DEPLOYMENTS)


def start_of(until: datetime, day: int, hour: float) -> int:
    """The moment (ms) of an hour (UTC) of one of the month's days."""
    first = (until - timedelta(days=DAYS)).astimezone(UTC)
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
    return int((midnight + timedelta(days=day, hours=hour)).timestamp() * 1000)


# Days on which the system prompts changed, so that everything is written anew.
_DEPLOYMENTS = (4, 11, 18, 25)
