"""Who waits and who runs, as `engine.schedule.lifecycle` sees it, where vLLM decides it."""

from collections.abc import Callable

from engine.backends.external.turns import ExternalTurns
from engine.backends.vllm.core import StepCounts
from engine.backends.vllm.directive import Directive
from engine.backends.vllm.mirror import HeldCache
from engine.cache.ids import Digest
from engine.schedule.request import RequestState, SequenceState


class Turns(ExternalTurns):
    """All sequences that vLLM has; `serve` brings one there, `drop` takes it away.

    Both are set by the loop, and called on its thread.
    """

    _cache: HeldCache

    def __init__(self, cache: HeldCache, counts: StepCounts, *, max_leased_blocks: int) -> None:
        """`max_leased_blocks`: the whole budget, of which a request may name its scope's share."""
        super().__init__(cache)
        self._counts = counts
        self._max_leased_blocks = max_leased_blocks
        self._directives: dict[str, Directive] = {}
        self._released: list[Digest] = []
        self._num_orders = 0
        self.serve: Callable[[SequenceState, Directive], None]
        self.drop: Callable[[SequenceState], None]

    @property
    def waiting(self) -> range:
        """As long as those that did not run in the last step are many."""
        return range(max(len(self._sequences) - self._counts.running, 0))

    def check(self) -> None:
        """Raise RuntimeError where vLLM's steps are not counted any more."""
        if self._counts.failure is not None:
            raise RuntimeError(f"the stat logger is off: {self._counts.failure}")

    def add(self, sequence: SequenceState) -> None:
        request = sequence.request
        assert request.found is not None
        directive = self._cache.directive(
            self._new_id(request), request.query, request.found, self._lease_blocks(request)
        )
        request.found.raced = self._raced(request)
        self._directives[request.request_id] = directive
        self._sequences[sequence] = None
        self.serve(sequence, directive)

    def add_fork(self, sequence: SequenceState) -> None:
        """Another choice: its leader has begun, so vLLM has the prompt's full blocks."""
        request = sequence.request
        self._sequences[sequence] = None
        self.serve(
            sequence,
            Directive(
                request_id=self._new_id(request),
                scope=request.query.scope,
                wants=[],
                lease_blocks=self._lease_blocks(request),
            ),
        )

    def remove(self, sequence: SequenceState) -> None:
        """It has ended, or is cancelled."""
        if sequence is sequence.request.leader:
            self.end_wants(sequence.request)
        self._take_out(sequence)
        self.drop(sequence)

    def end_wants(self, request: RequestState) -> None:
        """It began to answer, or never will: nothing waits for its wants any more."""
        directive = self._directives.pop(request.request_id, None)
        if directive is not None:
            self._released += self._cache.let_off(directive)

    def take_released(self) -> list[Digest]:
        """The keys that the connector may let go of now."""
        released, self._released = self._released, []
        return [*released, *self._cache.take_released()]

    def take_unleased(self) -> list[Digest]:
        """The keys whose leases the connector is to end, and not their entries."""
        return self._cache.take_unleased()

    def _lease_blocks(self, request: RequestState) -> int | None:
        share = request.query.lease_share
        return None if share is None else int(self._max_leased_blocks * share)

    def _new_id(self, request: RequestState) -> str:
        """A client may use an id again; the connector never hears one twice."""
        self._num_orders += 1
        return f"{request.request_id}/{self._num_orders}"
