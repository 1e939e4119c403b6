"""The simulated fleet: its engines, the gateway's own placement before them, and the outcome."""

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import msgspec

from engine.protocol import LONGEST_SECONDS, Event, Started
from gateway.planner.engine import Capacities, Costs, SimulatedEngine
from gateway.planner.requests import PlannedRequest
from gateway.routing.held import Ends, Holdings, PrefixIndex
from gateway.routing.router import Load, PromptSizes, Weights, place

EVENT_SECONDS = 0.02
"""The time from an engine's event until the gateway hears of it."""
_PROGRESS_REQUESTS = 256
"""Progress is told each time after this many requests."""
Tell = Callable[[int], None]
Conversation = Sequence[PlannedRequest]


@dataclass(slots=True)
class Candidate:
    """What a gateway knows of the engine with this number."""

    seed: int
    holdings: Holdings
    load: Load


class SimulatedGateway:
    """One gateway's knowledge of the engines: the index and the loads, as `gateway` keeps them."""

    def __init__(self, num_engines: int) -> None:
        self.weights = Weights()
        index = PrefixIndex()
        fade = self.weights.fade_seconds
        self.candidates = [
            Candidate(number, Holdings(index), Load(fade)) for number in range(num_engines)
        ]
        for candidate in self.candidates:
            candidate.holdings.epoch = "simulated"
            candidate.holdings.heard_at = 0.0
        self._seqs: Counter[int] = Counter()

    def hear(self, engine: int, events: list[Event], now: float) -> None:
        for event in events:
            self._seqs[engine] += 1
            holdings = self.candidates[engine].holdings
            holdings.apply(msgspec.structs.replace(event, seq=self._seqs[engine]), now)

    def choose(self, request: PlannedRequest, now: float) -> int:
        """Route the request, and return the number of its engine."""
        lengths = [request.tokens_at(name.tokens) for name in request.names]
        ends = Ends([name.digest for name in request.names], lengths)
        for candidate in self.candidates:
            candidate.holdings.heard_at = now  # heartbeats
        route = place(PromptSizes(ends, request.tokens), self.candidates, self.weights, now)
        route.engine.load.assign(_turn(request), route.to_prefill, now)
        route.engine.holdings.expect(route.expected, now)
        return route.engine.seed

    def started(self, engine: int, served: "Served", frame: Started, now: float) -> None:
        candidate = self.candidates[engine]
        request = served.request
        candidate.load.started(_turn(request), request.tokens - served.reused, now)
        candidate.holdings.learn(frame, [name.digest for name in request.names], now)

    def ended(self, engine: int, request: PlannedRequest) -> None:
        self.candidates[engine].load.ended(_turn(request))


def _turn(request: PlannedRequest) -> str:
    return str(id(request))


@dataclass(slots=True, kw_only=True)
class Served:
    """A request whose answer began."""

    request: PlannedRequest
    engine: int
    # Tokens of the prompt that a breakpoint's entry gave.
    read: int
    # Tokens of the prompt that were not computed.
    reused: int
    # Seconds to the first token.
    wait: float
    # The number of its breakpoints.
    breakpoints: int
    # How many of its breakpoints are leased.
    leased: int


@dataclass(slots=True)
class Outcome:
    """What a simulation gave."""

    # The requests in the order in which their answers began.
    served: list[Served] = field(default_factory=list)
    # How many leases ended, by the reason.
    leases: Counter[str] = field(default_factory=Counter)
    refused: int = 0
    preempted: int = 0
    # The virtual time of the last call.
    seconds: float = 0.0


class Simulation:
    """Runs requests on a fleet. Without a `gateway` they go to the engines in turn.

    Each call of `tell` has the number of requests sent since the call before.
    """

    def __init__(
        self,
        num_engines: int,
        capacities: Capacities,
        costs: Costs,
        unit: int,
        gateway: SimulatedGateway | None,
        tell: Tell = lambda count: None,
    ) -> None:
        self._now = 0.0
        self._calls: list[tuple[float, int, Callable[[float], None]]] = []
        self._numbers = count()
        self._gateway = gateway
        self._overhead = costs.overhead
        self._tell = tell
        self._num_sent = 0
        self._waiting: deque[Conversation] = deque()
        self._following: dict[int, Conversation] = {}
        self._outcome = Outcome()
        self._engines = [
            SimulatedEngine(capacities, unit, self._at, costs, has_names=gateway is not None)
            for _ in range(num_engines)
        ]
        for number, engine in enumerate(self._engines):
            engine.started = partial(self._on_started, number)
            engine.ended = partial(self._on_ended, number)
            if gateway is not None:
                engine.tell = partial(self._on_events, number)

    def replay(self, requests: Sequence[PlannedRequest]) -> Outcome:
        """Send each request at its time. The requests must be in the order of their times."""
        for request in requests:
            self._at(request.at, partial(self._send, request))
        times = [*(request.at for request in requests), math.inf]
        for engine in self._engines:
            engine.ahead.next_arrival = lambda: times[self._num_sent]
        return self._run()

    def converse(self, conversations: Sequence[Conversation], in_flight: int) -> Outcome:
        """Run `in_flight` conversations at a time. Each request is sent when the answer before it
        has ended."""
        self._waiting.extend(conversations)
        for _ in range(in_flight):
            self._go_on((), 0.0)
        return self._run()

    def _at(self, time: float, call: Callable[[float], None]) -> None:
        """Run `call` at this virtual time. Calls for one time run in the order they came."""
        heapq.heappush(self._calls, (time, next(self._numbers), call))

    def _run(self) -> Outcome:
        while self._calls:
            self._now, _, call = heapq.heappop(self._calls)
            call(self._now)
        outcome = self._outcome
        outcome.seconds = self._now
        for engine in self._engines:
            engine.close(self._now + 2 * LONGEST_SECONDS)
            outcome.leases += engine.leases_ended
            outcome.refused += engine.num_refused
            outcome.preempted += engine.scheduler.num_preempted
        return outcome

    def _go_on(self, conversation: Conversation, now: float) -> None:
        """Send the conversation's next request. If it has none, begin the next conversation."""
        if not conversation and self._waiting:
            conversation = self._waiting.popleft()
        if conversation:
            request = conversation[0]
            request.at = now
            self._following[id(request)] = conversation[1:]
            self._at(now, partial(self._send, request))

    def _send(self, request: PlannedRequest, now: float) -> None:
        engine = self._num_sent % len(self._engines)
        self._num_sent += 1
        if self._num_sent % _PROGRESS_REQUESTS == 0:
            self._tell(_PROGRESS_REQUESTS)
        if self._gateway is not None:
            engine = self._gateway.choose(request, now)
        self._engines[engine].take(request, now)

    def _on_started(self, engine: int, request: PlannedRequest, frame: Started, now: float) -> None:
        num_shared = len(request.units) - request.num_tail
        reused = len(request.units) - (frame.usage.computed_tokens or 0)
        served = Served(
            request=request,
            engine=engine,
            read=request.tokens_at(min(frame.usage.cache_read_tokens, num_shared)),
            reused=request.tokens_at(min(reused, num_shared)),
            wait=now - request.at + self._overhead,
            breakpoints=len(frame.breakpoints),
            leased=sum(entry.state == "leased" for entry in frame.breakpoints),
        )
        self._outcome.served.append(served)
        if self._gateway is not None:
            self._gateway.started(engine, served, frame, now)

    def _on_ended(self, engine: int, request: PlannedRequest, now: float) -> None:
        if self._gateway is not None:
            self._gateway.ended(engine, request)
        conversation = self._following.pop(id(request), None)
        if conversation is not None:
            self._go_on(conversation, now)

    def _on_events(self, engine: int, events: list[Event], now: float) -> None:
        assert self._gateway is not None
        self._at(now + EVENT_SECONDS, partial(self._gateway.hear, engine, events))
