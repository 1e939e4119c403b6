"""One simulated engine: real memory and the engine's order of work, under a virtual clock.

A time model stands in for the computation. A token of the pool stands for one *unit* of the
traffic. Units of one token and blocks of several units say to the token what an engine reads. Units
of more tokens are for long traces: then one step stands for several of the engine, and computes one
prompt to its end. What is not simulated: fair turns of scopes, and files that are still being
written.
"""

import math
from collections import Counter, deque
from collections.abc import Callable
from functools import partial

from engine.cache.residency import touch
from engine.protocol import Event
from gateway.planner.lineup import Lineup, Piece, SimulatedTurn, Step
from gateway.planner.memory import SimulatedMemory
from gateway.planner.simulated import Capacities, Costs, SimulatedRequest

__all__ = ["SimulatedEngine", "SimulatedTurn"]
_UNBOUNDED = 2**31
SHARED_SECONDS, LATELY_SECONDS, LEAST_SHARE = 0.02, 10.0, 16
"""Those of `engine/schedule/pace.py`."""
STEP_TOKENS = 2048
"""Of an engine whose steps are not told."""
At = Callable[[float, Callable[[float], None]], None]


class SimulatedEngine:
    """`at(time, call)` runs `call(time)` then. `started`, `ended` hear of turns, `tell` of events.

    `leases_ended` counts leases by why they ended.
    """

    def __init__(
        self,
        capacities: Capacities,
        unit_tokens: int,
        at: At,
        costs: Costs | None = None,
        *,
        has_names: bool = True,
    ) -> None:
        self._memory = SimulatedMemory(capacities, unit_tokens, has_names=has_names)
        self.pool, self.entries = self._memory.pool, self._memory.entries
        self._costs = costs or Costs()
        self._unit = unit_tokens
        self._is_exact = unit_tokens == 1
        running = capacities.max_running or _UNBOUNDED
        step_units = (self._costs.step_tokens or STEP_TOKENS) // unit_tokens
        self._lineup = Lineup(self._memory, running, step_units, is_exact=self._is_exact)
        self._at = at
        self._inbox: deque[tuple[SimulatedRequest, float]] = deque()
        self._step: Step | None = None
        self._began_at = 0.0
        self._num_rounds = 0
        self._round_seconds = 0.0
        self._number = 0
        self._seen: dict[str, float] = {}
        self.started: Callable[[SimulatedTurn, float], None] = lambda turn, now: None
        self.ended: Callable[[SimulatedTurn, float], None] = lambda turn, now: None
        self.tell: Callable[[list[Event], float], None] | None = None
        self.leases_ended: Counter[str] = Counter()
        self.num_refused = 0

    @property
    def num_preempted(self) -> int:
        return self._lineup.num_preempted

    def take(self, request: SimulatedRequest, now: float) -> None:
        """A request arrives. It is looked up between two steps."""
        self._inbox.append((request, now))
        if self._step is None:
            self._next(now)
        elif self._num_rounds > 1 and not self._step.pieces:
            self._cut(now)

    def close(self, now: float) -> None:
        """End what is over by now, and count it."""
        self.entries.expire(now)
        self._publish(now)

    # Inside.

    def _next(self, now: float) -> None:
        """Begin the next step, if there is something to compute."""
        self._look_up(now)
        while True:
            self.entries.expire(now)
            step = self._lineup.next_step(self._max_units(now))
            for turn in step.refused:
                self._refuse(turn, now)
            over = [turn for turn in self._lineup.running if turn.is_over]
            for turn in over:
                self._end(turn, now)
            if not step.is_empty or not (step.refused or over):
                break
        self._step = None if step.is_empty else step
        if self._step is not None:
            self._began_at = now
            self._wait(now + self._seconds(step))
        self._publish(now)

    def _max_units(self, now: float) -> int:
        """The units of prompts in a step: fewer while several scopes share the engine."""
        most = self._costs.step_tokens
        if not most or not self._is_exact:
            return _UNBOUNDED
        for turn in (*self._lineup.running, *self._lineup.waiting):
            self._seen[turn.request.scope] = now
        if len(self._seen) > 1:
            self._seen = {one: at for one, at in self._seen.items() if now - at <= LATELY_SECONDS}
        if len(self._seen) <= 1:
            return most
        fitting = int(SHARED_SECONDS / self._costs.prefill)
        return min(max(fitting, most // LEAST_SHARE, 1), most)

    def _look_up(self, now: float) -> None:
        while self._inbox:
            request, arrived_at = self._inbox.popleft()
            self.entries.expire(now)
            query, cache = self._memory.query(request, arrived_at), self._memory.cache
            table = cache.new_table(query)
            turn = SimulatedTurn(request, query, table, arrived_at, None)
            if not self._memory.fits(query):
                self._count_refused(turn, now)
                continue
            turn.found = cache.look_up(query)
            if self._lineup.has_work:
                touch(self.pool, query.digests)
            if self._is_exact:
                ends = {query.segments[point.segment].end for point in query.breakpoints}
                turn.boundaries = sorted(end for end in ends if end and end < request.tokens)
            self._lineup.waiting.append(turn)

    def _seconds(self, step: Step) -> float:
        """How long the step takes. It sets how many tokens each answer gets meanwhile."""
        costs, tokens = self._costs, sum(self._tokens_of(*piece) for piece in step.pieces)
        prefill = tokens * costs.prefill
        copies = step.num_host * costs.host + step.num_disk * costs.disk
        copies *= self._memory.block_tokens
        longest = max((self._num_left(turn) for turn in step.answers), default=0)
        if not step.pieces:
            self._num_rounds, self._round_seconds = self._rounds(step, longest), costs.decode
            return self._num_rounds * costs.decode
        if not costs.step_tokens:
            rounds = prefill / costs.decode if costs.decode else longest
            self._num_rounds = min(int(rounds), longest)
            return prefill + copies
        self._num_rounds = 1
        if not self._is_exact:
            self._num_rounds = max(min(math.ceil(tokens / costs.step_tokens), longest), 1)
        has_decode = bool(step.answers) or any(
            self._is_exact and piece.end - piece.start == 1 for piece in step.pieces
        )
        return prefill + copies + self._num_rounds * has_decode * costs.decode

    def _tokens_of(self, turn: SimulatedTurn, start: int, end: int) -> int:
        """Tokens of a piece, also behind the prompt."""
        request = turn.request
        size, whole = len(request.units), len(turn.query.tokens)
        if self._is_exact:
            # The engine takes one token alone for a decode.
            tokens = end - start if end - start > 1 else 0
            return tokens - (whole - request.tokens if start < whole <= end else 0)
        tokens = request.tokens_of(min(start, size), min(end, size))
        if start < whole <= end:
            tokens += request.tokens - request.tokens_of(0, size)
        return tokens + max(end - max(start, whole), 0) * self._unit

    def _num_left(self, turn: SimulatedTurn) -> int:
        return max(turn.request.output_tokens - turn.num_output, 1)

    def _rounds(self, step: Step, longest: int) -> int:
        """How many decode steps in a row nothing but decodes happens in."""
        if any(turn.written is None for turn in step.answers):
            return 1
        rounds = min((self._num_left(turn) for turn in step.answers), default=1)
        units = -(-rounds // self._unit)
        needed = sum(turn.table.blocks_needed(units) for turn in step.answers)
        pool = self.pool
        if needed > pool.num_reclaimable:
            return 1
        # An expiry changes what is reused next, and may make room for a turn that waits.
        if (needed > pool.num_empty or self._lineup.waiting) and self._costs.decode:
            due = self.entries.next_expiry()
            if due is not None:
                left = max(due - self._began_at, 0.0)
                rounds = min(rounds, math.ceil(left / self._costs.decode))
        return max(rounds, 1)

    def _wait(self, until: float) -> None:
        self._number += 1
        self._at(until, partial(self._end_step, self._number))

    def _cut(self, now: float) -> None:
        """A request came while answers were written: the decode step in progress is the last."""
        if not self._round_seconds:
            return
        rounds = int((now - self._began_at) / self._round_seconds) + 1
        if rounds < self._num_rounds:
            self._num_rounds = rounds
            self._wait(self._began_at + rounds * self._round_seconds)

    def _end_step(self, number: int, now: float) -> None:
        if number != self._number or self._step is None:
            return
        step, self._step = self._step, None
        begun: list[SimulatedTurn] = []
        for turn in step.answers:
            if turn.written is None:
                self._compute(Piece(turn, turn.table.num_tokens, turn.num_known), begun, now)
            else:
                self._answer(turn, self._num_rounds)
        for piece in step.pieces:
            self._compute(piece, begun, now)
        for turn in begun:
            self.started(turn, now)
        for turn in list(self._lineup.running):
            if turn.written is not None and turn.num_output >= turn.request.output_tokens:
                self._end(turn, now)
        self._publish(now)
        self._next(now)

    def _compute(self, piece: Piece, begun: list[SimulatedTurn], now: float) -> None:
        """A piece's keys and values are written. The last one of a prompt begins the answer."""
        turn = piece.turn
        turn.table.commit(turn.tokens[piece.start : piece.end])
        if piece.end < turn.num_known:
            return
        if turn.written is None:
            assert turn.found is not None
            turn.written = self._memory.write(turn.query, turn.found, turn.table, now)
            begun.append(turn)
        else:
            # It was preempted, and its answer was computed again with the prompt.
            turn.num_answered = turn.table.num_tokens - len(turn.query.tokens)
        if turn.request.output_tokens:
            turn.num_output += 1

    def _answer(self, turn: SimulatedTurn, num_tokens: int) -> None:
        """So many more tokens of an answer. The last one has no keys and values yet."""
        turn.num_output = min(turn.num_output + num_tokens, turn.request.output_tokens)
        answer, start = turn.request.answer, turn.num_answered
        end = min((turn.num_output - 1) // self._unit, len(answer) - 1)
        if not self._is_exact and turn.table.blocks_needed(end - start) > self.pool.num_reclaimable:
            # A long step has room for its first unit. The others follow when there is room.
            end = min(end, start + 1)
        if end > start:
            turn.table.prepare(end - start)
            turn.table.commit(answer[start:end])
            turn.num_answered = end

    def _end(self, turn: SimulatedTurn, now: float) -> None:
        self._lineup.remove(turn)
        if turn.written is None:
            assert turn.found is not None
            self._memory.cache.take_back(turn.found)
            self.num_refused += 1
        self.ended(turn, now)

    def _refuse(self, turn: SimulatedTurn, now: float) -> None:
        """A turn that does not fit into the whole pool."""
        if turn.found is not None:
            self._memory.cache.let_go(turn.found)
            self._memory.cache.take_back(turn.found)
        self._count_refused(turn, now)

    def _count_refused(self, turn: SimulatedTurn, now: float) -> None:
        self.num_refused += 1
        self.ended(turn, now)

    def _publish(self, now: float) -> None:
        events, reasons = self._memory.take_events()
        self.leases_ended.update(reasons)
        if events and self.tell is not None:
            self.tell(events, now)
