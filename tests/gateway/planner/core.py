"""The engine's own core under a manual clock: what it reads of planned requests, turn by turn."""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.backends.synthetic import SyntheticRunner
from engine.backends.synthetic_renderer import SyntheticParser
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.clock import ManualClock
from engine.protocol import Event, Frame, GenerateRequest, LeaseEnded, Prompt, Sampling, Started
from engine.schedule.accounting import Accounting
from engine.schedule.loop import EngineLoop
from engine.schedule.request import RequestState
from engine.schedule.runner import SampleParams
from engine.schedule.scheduler import Scheduler
from engine.text.formats.stops import StopStrings
from gateway.planner.engine import Capacities, Costs
from gateway.planner.requests import BLOCK_TOKENS, PlannedRequest

_SAMPLE = SampleParams(temperature=0.0, top_p=1.0, top_k=0, seed=0)


@dataclass(slots=True)
class Told:
    """What was said of one turn: tokens, and when its answer began."""

    read: int
    computed: int
    started_at: float


class Core:
    def __init__(self, capacities: Capacities, costs: Costs) -> None:
        self.clock = ManualClock()
        self.told: dict[int, Told] = {}
        self.ends: list[str] = []
        pool = BlockPool(capacities.device // BLOCK_TOKENS, BLOCK_TOKENS)
        entries = Entries(
            pool,
            lease_share=capacities.lease_share,
            scope_lease_share=capacities.scope_lease_share,
            ttl_scale=capacities.ttl_scale,
            grace_seconds=capacities.grace_seconds,
        )
        self._cache = PrefixCache(pool, entries, ChainHasher(b"core", BLOCK_TOKENS))
        self._min_tokens = capacities.min_cache_tokens
        self.scheduler = Scheduler(
            self._cache,
            max_step_tokens=costs.step_tokens,
            max_running=capacities.max_running,
        )
        runner = SyntheticRunner(
            prefill_seconds=costs.prefill,
            decode_seconds=costs.decode,
            copy_seconds=0.0,
            sleep=self.clock.advance,
        )
        self._accounting = Accounting(
            self._cache, self.clock, self._hear, epoch="core", max_context_tokens=10**6
        )
        self._loop = EngineLoop(self.scheduler, self._accounting, runner, max_waiting=10**6)

    def run(self, requests: Sequence[PlannedRequest]) -> None:
        """As the engine's thread does: calls between two steps, and steps while there is work."""
        coming = list(enumerate(requests))
        while coming or self.scheduler.has_work:
            while coming and coming[0][1].at <= self.clock.now():
                number, request = coming.pop(0)
                self._submit(number, request)
            if self.scheduler.has_work:
                self._loop.step()
            else:
                self.clock.advance(coming[0][1].at - self.clock.now())
        self.clock.advance(2 * 3600)
        self._accounting.expire(self.clock.now())
        self._accounting.publish()

    def _submit(self, number: int, request: PlannedRequest) -> None:
        tokens = request.units
        query = CacheQuery(
            scope=request.scope,
            tokens=tokens,
            digests=self._cache.digests(request.scope, tokens),
            segments=request.segments,
            breakpoints=request.breakpoints,
            names=[],
            min_tokens=self._min_tokens,
            arrived_at=request.at,
        )
        asked = GenerateRequest(
            request_id=str(number),
            scope=request.scope,
            prompt=Prompt(messages=[]),
            sampling=Sampling(max_tokens=request.output_tokens),
        )

        def emit(frame: Frame) -> None:
            if isinstance(frame, Started):
                usage = frame.usage
                assert usage.computed_tokens is not None
                at = self.clock.now()
                self.told[number] = Told(usage.cache_read_tokens, usage.computed_tokens, at)

        state = RequestState(
            request=asked,
            query=query,
            parsers=[SyntheticParser(StopStrings([]))],
            emit=emit,
            submitted_at=request.at,
        )
        self._loop.submit(state, [_SAMPLE])

    def _hear(self, events: list[Event]) -> None:
        self.ends += [event.reason for event in events if isinstance(event, LeaseEnded)]
