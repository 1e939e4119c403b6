"""F7: the wall clock jumps, as for daylight saving, leap seconds or a wrong time server. Nothing
that lasts depends on it."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.app import create_app
from gateway.base.clock import Clock
from scripts.bench.load import marked
from tests.conformance.engines import Engine, running_engine
from tests.e2e.fleet import Gateway
from tests.faults.sizes import number, told
from tests.gateway.serving import eventually, make_settings, serve_app
from tests.migrated import migrate

TICK = 1.0
STEPS = number(50, 500)
# Daylight saving, an hour wrong, a leap second, a battery that was empty.
JUMPS = (-3600, 3600, -1, 1, -86_400 * 365, 86_400 * 365)


@dataclass
class Jumping:
    """A wall clock that nobody can rely on, and a monotonic one that moves as told."""

    rng: random.Random
    now: float = 1000.0
    num_jumps: int = 0
    _wall: datetime = field(default=datetime(2026, 3, 29, 0, 59, 59, tzinfo=UTC))

    def wall(self) -> datetime:
        self.num_jumps += 1
        return self._wall + timedelta(seconds=self.rng.choice(JUMPS))

    def monotonic(self) -> float:
        return self.now


@contextmanager
def serving(data: Path, clock: Jumping) -> Iterator[tuple[Gateway, Engine]]:
    """Both clocks of the gateway are ours, and the engine's stands until it is moved."""
    options = {"CLOCK": "manual", "NUM_BLOCKS": 4096, "MIN_CACHE_TOKENS": 32}
    options |= {"SYNTHETIC_PREFILL_US": 0, "SYNTHETIC_DECODE_MS": 0}
    with running_engine("synthetic", options) as engine:
        settings = make_settings(data, engine.url)
        migrate(settings)
        app = create_app(settings, clock=Clock(wall=clock.wall, monotonic=clock.monotonic))
        with serve_app(app, settings) as url:
            yield Gateway(url), engine


def wait_until_ready(gateway: Gateway) -> None:
    """An engine that was silent for so long may count as lost until it is heard again."""
    eventually(lambda: gateway.engine(0)["status"] == "ready", 300)


@pytest.mark.timeout(1200)
def test_leases_end_at_their_time_whatever_the_wall_says(tmp_path: Path) -> None:
    """A lease is read until its TTL is over, to the tick."""
    rng = random.Random(7)
    clock = Jumping(rng)
    early = late = at_the_bound = 0
    with serving(tmp_path, clock) as (gateway, engine):

        def read(text: str, ttl: str) -> bool:
            wait_until_ready(gateway)
            usage = gateway.answer(marked(text, ttl), max_tokens=1)["usage"]
            return bool(usage["cache_read_input_tokens"])

        for step in range(STEPS):
            ttl, seconds = rng.choice((("5m", 300), ("1h", 3600)))
            text = f"Text of step {step}. " + "A rule. " * 40
            assert not read(text, ttl)
            wait = rng.choice((seconds - TICK, seconds, seconds + TICK, rng.uniform(1, 7200)))
            engine.advance(wait)
            clock.now += wait
            was_read = read(text, ttl)
            early += not was_read and wait < seconds
            late += was_read and wait >= seconds
            at_the_bound += abs(wait - seconds) <= TICK
    told(
        "F7, leases",
        steps=STEPS,
        jumps=clock.num_jumps,
        at_bound=at_the_bound,
        early=early,
        late=late,
    )
    assert early == late == 0
    assert at_the_bound > STEPS / 3 and clock.num_jumps >= STEPS


@pytest.mark.timeout(1200)
def test_rate_limits_count_no_wall_time(tmp_path: Path) -> None:
    """A bucket of 4 requests a minute, asked at random times: exactly what a bucket by monotonic
    time lets through."""
    rng = random.Random(77)
    # The gateway looks at the wall as often as it likes, which must not change what is asked when.
    clock = Jumping(random.Random(78))
    wrong = 0
    statuses = []
    with serving(tmp_path, clock) as (gateway, _):
        wait_until_ready(gateway)
        gateway.workspace("limited", requests_per_minute=4)
        limited = replace(gateway, workspace_key=gateway.make_key("limited")[1])
        level = 4.0
        last = clock.now
        for step in range(STEPS):
            clock.now += rng.choice((0.0, 1.1, 13.7, 16.3, 100.0))
            level = min(4.0, level + (clock.now - last) * 4 / 60)
            last = clock.now
            wait_until_ready(gateway)
            statuses.append(limited.ask([], f"step {step}", max_tokens=1).status_code)
            allowed = level >= 1
            level -= allowed
            wrong += (statuses[-1] == 200) != allowed
    told(
        "F7, rate limits",
        steps=STEPS,
        jumps=clock.num_jumps,
        refused=statuses.count(429),
        wrong=wrong,
    )
    assert wrong == 0 and {200, 429} == set(statuses), statuses
