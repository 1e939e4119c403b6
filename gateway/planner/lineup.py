"""Which turns of a simulated engine run, and what its next step computes.

It decides as the engine's scheduler does (`engine/schedule`): decodes first, then prompts in order
of arrival, or by what they reuse where they would evict each other's blocks. A turn is admitted if
all blocks of its prompt can be allocated. One that does not fit may be overtaken; one that waits
for a twin's blocks keeps its place. The youngest turn is preempted where an answer finds no block.
Holds of waiting turns and then leases go when nothing else can run. What it leaves out: fair turns
of scopes, and classes.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

from engine.cache.digests import common_blocks
from engine.cache.pool import NoFreeBlocks
from engine.cache.prefix_cache import CacheQuery, CacheResult, Found
from engine.cache.residency import (
    MAX_COMPARED,
    MAX_OVERTAKEN,
    Waiting,
    as_waiting,
    next_by_reuse,
)
from engine.cache.table import BlockTable
from gateway.planner.memory import Copied, SimulatedMemory
from gateway.planner.simulated import SimulatedRequest

MAX_TRIED, MAX_LOOKED_AT, SPARE_SHARE = 4, 64, 8
"""Those of `engine/schedule/scheduler.py`."""


@dataclass(slots=True, eq=False)
class SimulatedTurn:
    """`num_output` tokens of the answer are there, `num_answered` of its units have a place."""

    request: SimulatedRequest
    query: CacheQuery
    table: BlockTable
    arrived_at: float
    found: Found | None
    boundaries: Sequence[int] = ()
    written: CacheResult | None = None
    num_output: int = 0
    num_answered: int = 0
    num_overtaken: int = 0
    overtaken_tokens: int = 0
    num_needed: int = 0
    is_over: bool = False
    twin: "tuple[SimulatedTurn, int] | None" = None

    @property
    def num_known(self) -> int:
        """Units of the prompt and, once it has begun, of the answer with the next one."""
        size = len(self.query.tokens)
        if self.written is None:
            return size
        return size + min(self.num_answered + 1, len(self.request.answer))

    @property
    def num_pending(self) -> int:
        return self.num_known - self.table.num_tokens

    @property
    def is_comparable(self) -> bool:
        return self.written is None and self.found is not None

    @property
    def tokens(self) -> Sequence[int]:
        if self.written is None:
            return self.query.tokens
        return [*self.query.tokens, *self.request.answer[: self.num_answered + 1]]


class Piece(NamedTuple):
    """Units of a turn that one step computes."""

    turn: SimulatedTurn
    start: int
    end: int


@dataclass(slots=True)
class Step:
    """What a step computes. `refused` turns do not fit into the whole pool."""

    answers: list[SimulatedTurn] = field(default_factory=list)
    pieces: list[Piece] = field(default_factory=list)
    refused: list[SimulatedTurn] = field(default_factory=list)
    num_host: int = 0
    num_disk: int = 0

    @property
    def is_empty(self) -> bool:
        return not self.answers and not self.pieces


class Lineup:
    """`is_exact`: a step has so many units. Otherwise it computes one prompt to its end."""

    def __init__(
        self, memory: SimulatedMemory, max_running: int, step_units: int, *, is_exact: bool
    ) -> None:
        self._memory = memory
        self._step_units = step_units
        self._next: SimulatedTurn | None = None
        self._passed: list[SimulatedTurn] = []
        self._cache = memory.cache
        self._max_running = max_running
        self._is_exact = is_exact
        self.waiting: deque[SimulatedTurn] = deque()
        self.running: list[SimulatedTurn] = []
        self.num_preempted = 0

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def remove(self, turn: SimulatedTurn) -> None:
        """A running turn has ended."""
        self.running.remove(turn)
        turn.table.release()

    def next_step(self, max_units: int) -> Step:
        step = Step()
        self._look_up_again()
        for turn in list(self.running):
            if self._is_decode(turn) and turn in self.running and self._make_room(turn):
                step.answers.append(turn)
        step.answers = [turn for turn in step.answers if turn in self.running]
        room = max(max_units - len(step.answers), max_units // 4, 1)
        self._prefill(step, room)
        return step

    # Inside.

    def _is_decode(self, turn: SimulatedTurn) -> bool:
        """Whether it computes one token. A unit of a prompt may be many."""
        if turn.written is None:
            return self._is_exact and turn.num_pending == 1
        return turn.num_pending <= 1

    def _prefill(self, step: Step, room: int) -> None:
        going = deque(turn for turn in self.running if not self._is_decode(turn))
        overtaken: list[SimulatedTurn] = []
        candidate = self._next_waiting()
        while room > 0 and (going or candidate is not None):
            if going:
                turn = going.popleft()
            elif candidate is not None and self._admit(candidate, step):
                self._admitted(candidate, overtaken)
                turn, candidate = candidate, self._next_behind(overtaken)
            elif candidate is not None:
                if not candidate.is_over:
                    overtaken.append(candidate)
                candidate = self._next_behind(overtaken)
                continue
            for piece in self._pieces(turn, room):
                step.pieces.append(piece)
                room -= piece.end - piece.start
            if not self._is_exact:
                return

    def _pieces(self, turn: SimulatedTurn, room: int) -> Iterator[Piece]:
        """Up to the room, never across a boundary."""
        for start, stop in turn.table.gaps(turn.num_known):
            end = min(start + room, stop) if self._is_exact else stop
            for boundary in turn.boundaries:
                if start < boundary < end:
                    end = boundary
                    break
            yield Piece(turn, start, end)
            room -= end - start
            if end < stop or (self._is_exact and not room):
                return

    def _look_up_again(self) -> None:
        turn = self._next_waiting()
        if turn is not None and turn.found is None and turn.written is None:
            turn.found = self._cache.look_up(turn.query)

    def _next_waiting(self) -> SimulatedTurn | None:
        self._next, self._passed = None, []
        first = next((turn for turn in self.waiting if not self._awaits_twin(turn)), None)
        if first is None or not first.is_comparable:
            return first
        line = self._line(first)
        while len(line) > 1:
            waiting = [self._as_waiting(turn) for turn in line]
            index = next_by_reuse(waiting, self._memory.pool, self._step_units)
            if index == 0:
                break
            if not self._awaits_twin(line[index]):
                self._next, self._passed = line[index], line[:index]
                return self._next
            del line[index]
        return first

    def _line(self, first: SimulatedTurn) -> list[SimulatedTurn]:
        """A turn, and the next ones of its scope."""
        pool, line = self._memory.pool, [first]
        if pool.num_empty * pool.block_size >= first.num_pending:
            return line
        for turn in islice(self.waiting, MAX_LOOKED_AT):
            if len(line) == MAX_COMPARED:
                break
            is_of_scope = turn.request.scope == first.request.scope
            if is_of_scope and turn is not first and turn.is_comparable:
                line.append(turn)
        return line

    def _as_waiting(self, turn: SimulatedTurn) -> Waiting:
        assert turn.found is not None
        return as_waiting(
            self._memory.pool,
            turn.query.digests,
            turn.found.read,
            num_overtaken=turn.num_overtaken,
            overtaken=turn.overtaken_tokens,
        )

    def _admitted(self, turn: SimulatedTurn, overtaken: Sequence[SimulatedTurn]) -> None:
        passed = self._passed if turn is self._next else []
        for other in {*passed, *overtaken}:
            other.num_overtaken += 1
        for other in passed:
            other.overtaken_tokens += turn.num_pending
        self._next, self._passed = None, []

    def _next_behind(self, overtaken: Sequence[SimulatedTurn]) -> SimulatedTurn | None:
        if not overtaken:
            return self._next_waiting()
        if len(overtaken) > MAX_TRIED:
            return None
        if any(other.num_overtaken >= MAX_OVERTAKEN for other in overtaken):
            return None
        free = self._memory.pool.num_reclaimable
        for turn in islice(self.waiting, MAX_LOOKED_AT):
            if turn.num_needed > free or turn in overtaken:
                continue
            if turn.found is None and turn.written is None:
                continue
            if not self._awaits_twin(turn):
                return turn
        return None

    def _awaits_twin(self, turn: SimulatedTurn) -> bool:
        """Whether a running turn computes what this one would compute."""
        if turn.written is not None:
            return False
        if turn.twin is None or not self._is_computing(*turn.twin):
            turn.twin = self._find_twin(turn)
        return turn.twin is not None

    def _is_computing(self, twin: SimulatedTurn, units: int) -> bool:
        return twin in self.running and twin.table.num_tokens < units

    def _find_twin(self, turn: SimulatedTurn) -> tuple[SimulatedTurn, int] | None:
        """The running turn that computes most of this one's prefix, if waiting pays."""
        size, digests = self._memory.pool.block_size, turn.query.digests
        read = turn.found.read if turn.found is not None else 0
        usable, best, most = (digests.num_tokens - 1) // size, None, 0
        for other in self.running:
            if other.num_pending < size:
                continue
            shared = min(common_blocks(digests, other.query.digests), usable) * size
            computed = other.table.num_tokens
            saved = shared - max(read, computed)
            if saved >= size and 2 * saved >= shared - computed and saved > most:
                best, most = (other, shared), saved
        return best

    def _make_room(self, turn: SimulatedTurn) -> bool:
        """Get the block of an answer's next unit, by preempting the youngest turn if necessary."""
        while True:
            try:
                turn.table.prepare(turn.num_pending)
            except NoFreeBlocks:
                victim = self.running[-1]
                if victim is not turn:
                    self._preempt(victim)
                elif len(self.running) > 1:
                    self._preempt(turn)
                    return False
                elif not self._free_for(turn):
                    turn.is_over = True
                    return False
            else:
                return True

    def _preempt(self, turn: SimulatedTurn) -> None:
        self.num_preempted += 1
        self.running.remove(turn)
        turn.table.release()
        if turn.written is None and turn.found is not None:
            self._cache.give_up(turn.found)
            turn.found = None
        self.waiting.appendleft(turn)

    def _admit(self, turn: SimulatedTurn, step: Step) -> bool:
        if not self._has_place(turn) or (turn.found is None and turn.written is None):
            return False
        while True:
            try:
                self._begin(turn)
            except NoFreeBlocks as lack:
                turn.num_needed = lack.num_needed
                if self.running:
                    return False
                if not self._free_for(turn):
                    turn.is_over = True
                    self.waiting.remove(turn)
                    step.refused.append(turn)
                    return False
            else:
                self.waiting.remove(turn)
                self.running.append(turn)
                copied = self._bring_back(turn)
                step.num_host += copied.host
                step.num_disk += copied.disk
                return True

    def _begin(self, turn: SimulatedTurn) -> None:
        if turn.written is not None:
            self._cache.resume(turn.request.scope, turn.tokens, turn.table)
            return
        assert turn.found is not None
        self._cache.begin(turn.query, turn.found, turn.table)

    def _bring_back(self, turn: SimulatedTurn) -> Copied:
        found = turn.found if turn.written is None else None
        return self._memory.bring_back(turn.query, found, turn.table)

    def _has_place(self, turn: SimulatedTurn) -> bool:
        left = self._max_running - len(self.running)
        if left > 0:
            return True
        is_new_scope = all(other.request.scope != turn.request.scope for other in self.running)
        return is_new_scope and left + self._max_running // SPARE_SHARE > 0

    def _free_for(self, turn: SimulatedTurn) -> bool:
        """Free blocks when nothing else can run: holds of waiting turns first, then leases."""
        for other in reversed(self.waiting):
            if other is not turn and other.found is not None and other.found.held:
                self._cache.give_up(other.found)
                other.found = None
                return True
        return self._cache.entries.leases.sacrifice()
