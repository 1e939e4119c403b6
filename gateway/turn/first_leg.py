"""A turn in two legs: one engine prefills the prompt, another one reads it and answers.

The first leg is a request with `max_tokens` 0, whose frames are not passed on. When it has ended,
and an engine that may answer has told that it can read the prefix, the turn goes on as at every
next attempt. A first leg that fails, or takes too long, is given up. `routing/router.py` says which
turns have one. The turn's usage is that of the first leg: what it wrote counts as written.
"""

import asyncio
from dataclasses import dataclass, field

import msgspec

from engine.protocol import Frame, GenerateRequest, Started
from gateway.base.clock import Clock
from gateway.base.errors import EngineTimeout
from gateway.prompt.ask import Ask
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet
from gateway.routing.router import Route, Router, marked_tokens, prefill_elsewhere

LEG_SECONDS = 60.0
"""Seconds that a first leg may take."""
ARRIVAL_SECONDS = 5.0
"""Seconds until another engine must have told that it can read the prefix."""
REST_SECONDS = 30.0
"""Seconds for which an engine gets no first leg after one that came to nothing."""
_PAUSE_SECONDS = 0.02


@dataclass(slots=True)
class FirstLeg:
    """A running first leg. `started` is its first frame, once that has come."""

    route: Route[Engine]
    began: float
    started: Started | None = None

    def check_time(self, now: float) -> None:
        """Raise EngineTimeout for a leg that takes too long."""
        if self.started is None and now - self.began > LEG_SECONDS:
            raise EngineTimeout


@dataclass(slots=True)
class FirstLegs:
    """`resting`: the epochs of engines whose last first leg failed, and the monotonic second until
    which each gets no other."""

    fleet: Fleet
    router: Router
    clock: Clock
    resting: dict[str, float] = field(default_factory=dict)

    def begin(self, ask: Ask, route: Route[Engine]) -> FirstLeg | None:
        """The first leg of a turn that `route` would answer, if it has one."""
        if ask.sampling.max_tokens == 0:
            return None
        # Most fleets have no such engine, and every turn asks.
        able = [e for e in self.fleet.ready if e.description and e.description.role == "prefill"]
        if not able:
            return None
        now = self.clock.monotonic()
        able = [engine for engine in able if self.resting.get(_epoch_of(engine), now) <= now]
        found = prefill_elsewhere(ask, route, able, self.router.weights, now)
        return None if found is None else FirstLeg(found, now)

    async def arrived(self, ask: Ask, leg: FirstLeg) -> None:
        """Return when an engine that answers can read the prefix, or after ARRIVAL_SECONDS.

        Return at once where no such engine is ready.
        """
        ends = leg.route.prompt.ends
        marked = marked_tokens(ask, ends)
        deadline = self.clock.monotonic() + ARRIVAL_SECONDS
        while (now := self.clock.monotonic()) < deadline:
            theirs = leg.route.engine.description
            others = [
                engine
                for engine in self.fleet.ready
                if (mine := engine.description) is not None
                and (mine.role != "prefill" and theirs is not None and mine.model == theirs.model)
            ]
            if not others or any(e.holdings.coverage(ends, now).prefix >= marked for e in others):
                return
            await asyncio.sleep(_PAUSE_SECONDS)
        self.failed(leg)

    def failed(self, leg: FirstLeg) -> None:
        """The leg came to nothing."""
        now = self.clock.monotonic()
        self.resting = {epoch: until for epoch, until in self.resting.items() if until > now}
        self.resting[_epoch_of(leg.route.engine)] = now + REST_SECONDS


def _epoch_of(engine: Engine) -> str:
    return engine.description.epoch if engine.description is not None else ""


def prefill_only(request: GenerateRequest) -> GenerateRequest:
    """The request of a first leg: the same prompt with `max_tokens` 0."""
    sampling = msgspec.structs.replace(request.sampling, max_tokens=0, num_choices=1)
    return msgspec.structs.replace(request, sampling=sampling)


def over_legs(frames: list[Frame], first: Started | None) -> list[Frame]:
    """The answering engine's frames, with the first leg's usage and times in Started."""
    if first is None:
        return frames
    joined = list(frames)
    for index, frame in enumerate(frames):
        if isinstance(frame, Started):
            computed = first.usage.computed_tokens + frame.usage.computed_tokens
            joined[index] = msgspec.structs.replace(
                frame,
                usage=msgspec.structs.replace(first.usage, computed_tokens=computed),
                miss_reason=first.miss_reason,
                read_tier=first.read_tier,
                bring_back_seconds=first.bring_back_seconds,
                queue_seconds=first.queue_seconds + frame.queue_seconds,
                prefill_seconds=first.prefill_seconds + frame.prefill_seconds,
            )
    return joined
