"""How many tokens a step prefills while several scopes share the engine.

A first token waits for the step in progress and for its own. One scope alone gets steps of
`max_tokens`, which compute the most tokens a second. While several scopes are here, or were here
lately, a step should take SHARED_SECONDS. The number of tokens that a step computes in that time is
learned from the steps, for each depth, since a token deep in a prompt reads more keys. To admit a
long prompt takes time too, even if nothing of it is computed.
"""

import math
from collections.abc import Iterable, Sequence

from engine.schedule.request import SequenceState

SHARED_SECONDS = 0.02
LATELY_SECONDS = 10.0
"""A scope that had a request in this time is expected to send the next one."""
ADMITTED_BLOCKS = 4096
"""About how many blocks of prompts a shared step admits. The look-up of a block takes some 5 µs."""
FIRST_TOKENS = 3
"""A client's first text comes with one of this many first tokens."""
MAX_YIELDED = 3
"""How many steps in a row a long prompt waits for others' first tokens."""
_LEAST_SHARE = 16
"""A step computes this part of `max_tokens` at least: every step also has a fixed cost."""
_WHOLE_PIECES = 4
"""The rest of a prompt is computed whole if it has at most this many times `least_tokens`."""
_DEPTH_TOKENS = 256
_MAX_SCOPES = 1024


class StepPace:
    """Used from the engine's thread alone. Times are seconds of the engine's clock."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.least_tokens = max(max_tokens // _LEAST_SHARE, 1)
        self._tokens: dict[int, float] = {}
        self._seen: dict[str, float] = {}
        self._urgent: set[str] = set()
        self._num_yielded = 0
        self._has_yielded = False

    def see(self, scopes: Iterable[str], now: float) -> None:
        """Note which scopes have requests now. A scope's batches count as another scope."""
        for scope in scopes:
            self._seen.pop(scope, None)
            self._seen[scope] = now
        while self._seen:
            oldest = next(iter(self._seen))
            if now - self._seen[oldest] <= LATELY_SECONDS and len(self._seen) <= _MAX_SCOPES:
                return
            del self._seen[oldest]

    @property
    def is_shared(self) -> bool:
        return len(self._seen) > 1

    def is_short(self, sequence: SequenceState) -> bool:
        """Whether the rest of its prompt is computed whole, even in a short step."""
        lookup = sequence.request.lookup
        num_left = sequence.num_pending
        if sequence is sequence.request.leader and not sequence.table.num_tokens and lookup:
            num_left -= lookup.read  # it still waits, and will read these from memory
        return num_left <= _WHOLE_PIECES * self.least_tokens

    def tokens_at(self, position: int) -> float:
        """How many tokens from this position of a prompt a shared step computes."""
        depth = _depth(position)
        if not self._tokens:
            return self.max_tokens
        nearest = min(self._tokens, key=lambda known: (abs(known - depth), known))
        return self._tokens[nearest]

    def learn(self, positions: Sequence[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that took `seconds` and prefilled these `positions`: (start, count).

        A step much smaller than allowed teaches nothing, unless it took too long.
        """
        total = sum(count for _, count in positions)
        if seconds <= 0 or not total:
            return
        start, _ = max(positions, key=lambda position: position[1])
        known = self.tokens_at(start)
        if seconds < SHARED_SECONDS and 2 * total < known:
            return
        fitting = total * SHARED_SECONDS / seconds
        # Half the way, on a logarithmic scale: one step may have waited for a busy processor.
        learned = math.sqrt(known * min(max(fitting, known / 16), 4 * known))
        self._tokens[_depth(start)] = min(max(learned, self.least_tokens), self.max_tokens)

    def new_room(self, num_decodes: int) -> "StepRoom":
        """The room of a step for prefill.

        A share is left however many sequences decode, so that prefills end.
        """
        tokens = max(self.max_tokens - num_decodes, self.max_tokens // 4)
        return StepRoom(self if self.is_shared else None, tokens)

    def new_part(self) -> "StepRoom":
        """The room of prompts beside others' decoding: a quarter of a short step."""
        return StepRoom(None, max(int(self.tokens_at(0)) // 4, self.least_tokens))

    # A long prompt waits a few steps for the first tokens of other scopes, since a step that only
    # decodes takes a fraction of the time.

    def begin(self, running: Sequence[SequenceState], candidate: SequenceState | None) -> None:
        """A step is planned now. `candidate` is the first sequence that waits."""
        self._num_yielded = self._num_yielded + 1 if self._has_yielded else 0
        self._has_yielded = False
        self._urgent = {
            sequence.scope
            for sequence in running
            if not sequence.is_batch
            and sequence.num_pending
            and sequence.can_sample
            and sequence.num_output < FIRST_TOKENS
            and (sequence.request.started_at is not None or self.is_short(sequence))
        }
        if candidate is not None:
            self.admitted(candidate)

    def admitted(self, sequence: SequenceState) -> None:
        """This sequence runs from this step on."""
        if self.is_short(sequence) and not sequence.is_batch:
            self._urgent.add(sequence.scope)

    def yields(self, sequence: SequenceState) -> bool:
        """Whether this sequence's prompt must wait for the next step."""
        if not self.is_shared or self._num_yielded >= MAX_YIELDED or sequence.is_batch:
            return False
        must_wait = not self.is_short(sequence) and bool(self._urgent - {sequence.scope})
        self._has_yielded = self._has_yielded or must_wait
        return must_wait


class StepRoom:
    """What is left of one step: tokens, and time where scopes share the engine."""

    def __init__(self, pace: StepPace | None, tokens: int) -> None:
        self._pace = pace
        self._tokens = tokens
        self._time_share = 1.0

    @property
    def is_left(self) -> bool:
        return self._tokens > 0 and self._time_share > 0

    def tokens_for(self, sequence: SequenceState) -> int:
        """How many tokens of this sequence's prompt there is room for, 0 where it does not pay."""
        if self._pace is None:
            return self._tokens
        pace = self._pace
        start = sequence.table.num_tokens
        fitting = int(self._time_share * pace.tokens_at(start))
        if self._time_share == 1:
            least = pace.least_tokens
            fitting = max(fitting, sequence.num_pending if pace.is_short(sequence) else least)
        elif fitting < min(pace.least_tokens, sequence.num_pending):
            return 0
        return min(fitting, self._tokens)

    def take(self, start: int, count: int) -> None:
        self._tokens -= count
        if self._pace is not None:
            self._time_share = max(self._time_share - count / self._pace.tokens_at(start), 0.0)

    def take_admission(self, num_blocks: int) -> int:
        """A prompt of so many blocks was admitted.

        Return how many tokens a shared step computes in the time that this took; 0 where no scopes
        share the engine.
        """
        if self._pace is None:
            return 0
        share = num_blocks / ADMITTED_BLOCKS
        self._time_share = max(self._time_share - share, 0.0)
        return int(share * self._pace.tokens_at(0))


def _depth(position: int) -> int:
    """The depth of a position. Positions of one depth cost about the same. Each depth ends twice as
    far as the one before."""
    return (position // _DEPTH_TOKENS).bit_length()
