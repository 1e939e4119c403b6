"""F7: the wall clock jumps, as for daylight saving, leap seconds or a wrong time server. Nothing
that lasts depends on it."""

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from gateway.app import create_app
from gateway.base.clock import Clock
from gateway.cli.migrate import migrate
from tests.e2e.test_miss_reasons import House, Machine
from tests.faults.sizes import number, told
from tests.gateway import serving
from tests.gateway.admin_client import Admin
from tests.gateway.serving import make_settings, serve_app

TICK = 1.0
STEPS = number(50, 500)
# Daylight saving, an hour wrong, a leap second, a battery that was empty.
JUMPS = (-3600, 3600, -1, 1, -86_400 * 365, 86_400 * 365)
SECRET = "engine-secret-for-tests"


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


@pytest.mark.timeout(1200)
def test_leases_end_at_their_time_whatever_the_wall_says(tmp_path: Path) -> None:
    """A lease is read until its TTL is over, to the tick; both clocks of the gateway are ours, and
    the engine's stands until it is moved."""
    rng = random.Random(7)
    clock = Jumping(rng)
    machine = Machine({"ENGINE_NUM_BLOCKS": "4096", "ENGINE_SYNTHETIC_PREFILL_US": "0"})
    early = late = at_the_bound = 0
    try:
        machine.start()
        settings = make_settings(tmp_path, machine.url, engine_secret=SECRET)
        migrate(settings)
        app = create_app(settings, clock=Clock(wall=clock.wall, monotonic=clock.monotonic))
        with serve_app(app, settings) as url:
            house = House(url, [machine])
            house.wait_for(ready=1)
            for step in range(STEPS):
                ttl, seconds = rng.choice((("5m", 300), ("1h", 3600)))
                text = f"Text of step {step}. " + "A rule. " * 40
                assert house.ask(text, ttl)["usage"]["cache_read_input_tokens"] == 0
                wait = rng.choice((seconds - TICK, seconds, seconds + TICK, rng.uniform(1, 7200)))
                machine.post("clock/advance", {"seconds": wait})
                clock.now += wait
                house.wait_for(ready=1)
                was_read = house.ask(text, ttl)["usage"]["cache_read_input_tokens"] > 0
                early += not was_read and wait < seconds
                late += was_read and wait >= seconds
                at_the_bound += abs(wait - seconds) <= TICK
    finally:
        machine.stop()
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
    """A bucket of 60 requests a minute, asked at random times: exactly what a bucket by monotonic
    time lets through."""
    rng = random.Random(77)
    # The gateway looks at the wall as often as it likes, which must not change what is asked when.
    clock = Jumping(random.Random(78))
    machine = Machine({"ENGINE_NUM_BLOCKS": "512", "ENGINE_SYNTHETIC_PREFILL_US": "0"})
    wrong, statuses = 0, []
    try:
        machine.start()
        settings = make_settings(tmp_path, machine.url, engine_secret=SECRET)
        migrate(settings)
        app = create_app(settings, clock=Clock(wall=clock.wall, monotonic=clock.monotonic))
        with serve_app(app, settings) as url:
            house = House(url, [machine])
            house.wait_for(ready=1)
            key = limited_key(url)
            level, last = 4.0, clock.now
            for step in range(STEPS):
                clock.now += rng.choice((0.0, 1.1, 13.7, 16.3, 100.0))
                level = min(4.0, level + (clock.now - last) * 4 / 60)
                last = clock.now
                # An engine that was silent for so long may count as lost until it is heard again.
                house.wait_for(ready=1)
                status = ask(url, key, step)
                statuses.append(status)
                allowed = level >= 1
                level -= allowed
                wrong += (status == 200) != allowed
    finally:
        machine.stop()
    told(
        "F7, rate limits",
        steps=STEPS,
        jumps=clock.num_jumps,
        refused=statuses.count(429),
        wrong=wrong,
    )
    assert wrong == 0 and {200, 429} == set(statuses), statuses


def limited_key(url: str) -> str:
    """Of a workspace with 4 requests a minute."""
    admin = Admin(url)
    admin.workspace("limited", requests_per_minute=4)
    made: str = admin.make_key("limited")[1]
    return made


def ask(url: str, key: str, step: int) -> int:
    said = [{"role": "user", "content": f"step {step}"}]
    asked = {"model": "synthetic", "max_tokens": 1, "messages": said}
    return serving.ask(url, key=key, **asked).status_code
