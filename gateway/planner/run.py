"""One fleet under the traffic: the gateway's placement, the engines' pools, and counts."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from engine.protocol import Event
from gateway.planner.engine import SimulatedEngine, SimulatedTurn
from gateway.planner.fleet import EVENT_SECONDS, Clockwork, SimulatedGateway
from gateway.planner.requests import PlannedRequest
from gateway.planner.simulated import Capacities, Costs

_TOLD_EVERY = 256
Tell = Callable[[int], None]


@dataclass(slots=True)
class Outcome:
    """Tokens and first-token seconds of the counted requests; leases of all of them."""

    prompt: int = 0
    read: int = 0
    reused: int = 0
    waits: list[float] = field(default_factory=list)
    leases: Counter[str] = field(default_factory=Counter)
    leased: int = 0
    breakpoints: int = 0
    refused: int = 0

    @property
    def promise_kept(self) -> float | None:
        ended = sum(self.leases.values())
        return self.leases["expired"] / ended if ended else None


class Run:
    """`requests` are in order of time. `tell` hears how many more were sent."""

    def __init__(
        self, num_engines: int, capacities: Capacities, costs: Costs, unit: int, tell: Tell
    ) -> None:
        self._clock = Clockwork()
        self._overhead = costs.overhead
        self._engines = [
            SimulatedEngine(capacities, unit, self._clock.at, costs, has_names=num_engines > 1)
            for _ in range(num_engines)
        ]
        self._gateway = SimulatedGateway(num_engines, None) if num_engines > 1 else None
        self._tell = tell
        self._names: dict[int, str] = {}
        self._num_sent = 0
        self.outcome = Outcome()
        for number, engine in enumerate(self._engines):
            engine.started = partial(self._on_started, number)
            engine.ended = partial(self._on_ended, number)
            if self._gateway is not None:
                engine.tell = partial(self._on_events, number)

    def run(self, requests: Sequence[PlannedRequest]) -> Outcome:
        queue = iter(requests)
        self._send_next(next(queue, None), queue.__next__)
        self._clock.run()
        if requests:
            for engine in self._engines:
                engine.close(self._clock.now + 2 * 3600)
        for engine in self._engines:
            self.outcome.leases += engine.leases_ended
            self.outcome.refused += engine.num_refused
        return self.outcome

    def _send_next(
        self, request: PlannedRequest | None, following: Callable[[], PlannedRequest]
    ) -> None:
        """Only the next request waits in the clockwork, so that it stays short."""
        if request is None:
            return

        def send(now: float) -> None:
            assert request is not None
            self._send(request, now)
            try:
                coming = following()
            except StopIteration:
                return
            self._send_next(coming, following)

        self._clock.at(request.at, send)

    def _send(self, request: PlannedRequest, now: float) -> None:
        self._num_sent += 1
        if self._num_sent % _TOLD_EVERY == 0:
            self._tell(_TOLD_EVERY)
        chosen = 0
        if self._gateway is not None:
            turn = self._names[id(request)] = f"turn-{self._num_sent}"
            chosen = self._gateway.choose(request, turn, now)
        self._engines[chosen].take(request, now)

    def _on_started(self, engine: int, job: SimulatedTurn, now: float) -> None:
        request = job.request
        assert isinstance(request, PlannedRequest) and job.written is not None
        assert job.found is not None
        reused = request.tokens_of(0, min(job.found.reused, len(request.units)))
        if self._gateway is not None:
            computed = request.tokens - reused
            self._gateway.started(engine, self._names[id(request)], job, computed, now)
        if not request.is_counted:
            return
        outcome = self.outcome
        outcome.prompt += request.tokens
        outcome.reused += reused
        outcome.read += request.tokens_of(0, min(job.found.read, len(request.units)))
        outcome.waits.append(now - job.arrived_at + self._overhead)
        for each in job.written.breakpoints:
            outcome.breakpoints += 1
            outcome.leased += each.state == "leased"

    def _on_ended(self, engine: int, job: SimulatedTurn, now: float) -> None:
        if self._gateway is not None:
            turn = self._names.pop(id(job.request))
            self._gateway.candidates[engine].load.ended(turn)

    def _on_events(self, engine: int, events: list[Event], now: float) -> None:
        assert self._gateway is not None
        self._clock.at(now + EVENT_SECONDS, partial(self._gateway.hear, engine, events))
