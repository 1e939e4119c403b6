"""The simulated fleet: engines, the gateway's own routing code or another policy, and counts."""

import heapq
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, field
from functools import partial
from itertools import count

import msgspec

from engine.protocol import Event, InputUsage, Started
from gateway.planner.engine import SimulatedEngine, SimulatedTurn
from gateway.planner.simulated import SimulatedRequest
from gateway.routing.cost import Candidate, Load, PromptSizes, Weights, place
from gateway.routing.held import PrefixEnd, ResidencyIndex

HONOURED_SECONDS = 300.0
EVENT_SECONDS = 0.02
"""From an engine's event to a gateway that knows it."""
POLL_SECONDS = 0.25
"""Between two looks of a gateway at what an engine has computed in all."""

POLICIES = ("cost", "learned", "round_robin")


@dataclass
class Counts:
    """Tokens of one class of requests. `honoured` of `promised` were reused within 5 minutes."""

    requests: int = 0
    prompt: int = 0
    ideal: int = 0
    reused: int = 0
    promised: int = 0
    honoured: int = 0


@dataclass
class Result:
    counts: dict[str, Counts] = field(default_factory=dict)
    loads: Counter[int] = field(default_factory=Counter)
    waits: list[float] = field(default_factory=list)
    seconds: float = 0.0
    refused: int = 0

    def total(self) -> Counts:
        return Counts(*map(sum, zip(*map(astuple, self.counts.values()), strict=True)))


class Clockwork:
    """Calls in order of their virtual time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._calls: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()

    def at(self, time: float, call: Callable[[float], None]) -> None:
        heapq.heappush(self._calls, (time, next(self._numbers), call))

    @property
    def is_over(self) -> bool:
        return not self._calls

    def run(self) -> None:
        while self._calls:
            self.now, _, call = heapq.heappop(self._calls)
            call(self.now)


class SimulatedGateway:
    """One gateway's knowledge of the engines: the index and the loads, as `gateway` keeps them."""

    def __init__(self, num_engines: int, learned_capacity: int | None) -> None:
        self.weights = Weights()
        self.candidates = [
            Candidate(
                identity=f"engine-{number}",
                holdings=ResidencyIndex(capacity_tokens=learned_capacity),
                load=Load(self.weights.fade_seconds),
            )
            for number in range(num_engines)
        ]
        for candidate in self.candidates:
            candidate.holdings.epoch = "simulated"
            candidate.holdings.heard_at = 0.0
        self._seqs: Counter[int] = Counter()

    def hear(self, engine: int, events: list[Event], now: float) -> None:
        holdings = self.candidates[engine].holdings
        if holdings.source == "learned":
            return
        for event in events:
            self._seqs[engine] += 1
            holdings.apply(msgspec.structs.replace(event, seq=self._seqs[engine]), now)

    def choose(self, request: SimulatedRequest, turn: str, now: float) -> int:
        """The engine's number."""
        ends = [
            PrefixEnd(name.digest, request.tokens_of(0, name.tokens)) for name in request.names()
        ]
        for candidate in self.candidates:
            candidate.holdings.heard_at = now  # heartbeats
        placement = place(
            PromptSizes(ends=ends, tokens=request.tokens), self.candidates, self.weights, now
        )
        candidate = self.candidates[placement.chosen]
        candidate.load.assign(turn, int(placement.offer.to_prefill), now)
        candidate.holdings.touch(ends)
        candidate.holdings.expect(ends, now)
        return placement.chosen

    def started(
        self, engine: int, turn: str, job: SimulatedTurn, computed: int, now: float
    ) -> None:
        candidate = self.candidates[engine]
        candidate.load.started(turn, computed, now)
        assert job.written is not None
        receipt, request = job.written.receipt, job.request
        tokens = [request.tokens_of(0, units) for units in receipt.name_tokens]
        started = Started(
            request_id=turn,
            epoch="simulated",
            usage=InputUsage(input_tokens=0),
            breakpoints=[],
            receipt=msgspec.structs.replace(receipt, name_tokens=tokens),
        )
        digests = [name.digest for name in request.names()]
        candidate.holdings.learn(started, digests, now)


class Simulation:
    """`in_flight` bounds a closed loop of conversations; None replays by the requests' times."""

    def __init__(
        self,
        engines: list[SimulatedEngine],
        clockwork: Clockwork,
        policy: str,
        gateway: SimulatedGateway,
        in_flight: int | None = None,
    ) -> None:
        self._engines = engines
        self._clock = clockwork
        self._policy = policy
        self._gateway = gateway
        self._in_flight = in_flight
        self._waiting: deque[SimulatedRequest] = deque()
        self._num_running = 0
        self._numbers = count()
        self._turns: dict[int, str] = {}
        self._seen: set[int] = set()
        self._used_at: dict[int, float] = {}
        self._computed: Counter[int] = Counter()
        self.result = Result()
        for number, engine in enumerate(engines):
            engine.started = partial(self._on_started, number)
            engine.ended = partial(self._on_ended, number)
            engine.tell = partial(self._on_events, number)

    def run(self, requests: Iterable[SimulatedRequest]) -> Result:
        if self._in_flight is None:
            for request in requests:
                self._clock.at(request.at, partial(self._send, request))
        else:
            self._waiting.extend(requests)
            for _ in range(min(self._in_flight, len(self._waiting))):
                self._next_talk(0.0)
        self._clock.at(0.0, self._poll)
        self._clock.run()
        self.result.seconds = self._clock.now
        self.result.refused = sum(engine.num_refused for engine in self._engines)
        return self.result

    def _poll(self, now: float) -> None:
        """What others sent is known from the engine's own count, as in `gateway.routing.engine`."""
        for number, candidate in enumerate(self._gateway.candidates):
            candidate.load.observe(self._computed[number], now)
        if not self._clock.is_over:
            self._clock.at(now + POLL_SECONDS, self._poll)

    def _next_talk(self, now: float) -> None:
        if self._waiting:
            request = self._waiting.popleft()
            self._clock.at(now, partial(self._send, request))

    def _send(self, request: SimulatedRequest, now: float) -> None:
        number = next(self._numbers)
        turn = f"turn-{number}"
        counts = self.result.counts.setdefault(request.kind, Counts())
        counts.requests += 1
        counts.prompt += request.tokens
        counts.ideal += self._ideal(request)
        if self._policy == "round_robin":
            engine = number % len(self._engines)
        else:
            engine = self._gateway.choose(request, turn, now)
        self._turns[id(request)] = turn
        self._engines[engine].take(request, now)

    def _ideal(self, request: SimulatedRequest) -> int:
        """What an infinite cache would have: the known prefix, never the last unit."""
        known = next(
            (i for i, unit in enumerate(request.units) if unit not in self._seen),
            len(request.units),
        )
        self._seen.update(request.units)
        return request.tokens_of(0, min(known, len(request.units) - 1))

    def _on_started(self, engine: int, job: SimulatedTurn, now: float) -> None:
        request = job.request
        assert job.found is not None
        reused = request.tokens_of(0, job.found.reused)
        turn = self._turns[id(request)]
        counts = self.result.counts[request.kind]
        counts.reused += reused
        self.result.loads[engine] += request.tokens - reused + request.output_tokens
        self._computed[engine] += request.tokens - reused
        self.result.waits.append(now - job.arrived_at)
        self._keep_promise(job, counts)
        self._gateway.started(engine, turn, job, request.tokens - reused, now)

    def _keep_promise(self, job: SimulatedTurn, counts: Counts) -> None:
        request, at = job.request, job.arrived_at
        if not request.is_marked:
            return
        assert job.found is not None
        for index, unit in enumerate(request.units[:-1]):
            used_at = self._used_at.get(unit)
            if used_at is not None and at - used_at <= HONOURED_SECONDS:
                tokens = request.tokens_of(index, index + 1)
                counts.promised += tokens
                counts.honoured += tokens if index < job.found.reused else 0
        for unit in request.units:
            self._used_at[unit] = at

    def _on_ended(self, engine: int, job: SimulatedTurn, now: float) -> None:
        turn = self._turns.pop(id(job.request))
        self._gateway.candidates[engine].load.ended(turn)
        if job.request.next is not None:
            self._clock.at(now, partial(self._send, job.request.next))
        elif self._in_flight is not None:
            self._next_talk(now)

    def _on_events(self, engine: int, events: list[Event], now: float) -> None:
        self._clock.at(now + EVENT_SECONDS, partial(self._gateway.hear, engine, events))
