"""Which request may have a worker, by two things: the known times of grammars, and the time that
each scope has used of late. Pure."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.backends.prepare.prepared import MayCompile, Verdict

KNOWN_SECONDS = 600.0
"""How long a grammar's time is remembered. A grammar that is known to take too much is refused
without a try."""
MAX_KNOWN = 4_096
SHORT_SECONDS = 0.2
"""Seconds of processor time. Any worker compiles a grammar that is known to take no more."""
SLOW_SECONDS = 1.0
"""A scope is slow while it has used more seconds of workers than this beyond its share."""
SCOPE_SHARE = 0.25
"""Seconds of workers that a scope may use in each second without being slow."""


@dataclass(frozen=True, slots=True)
class _Known:
    """The known time of a grammar."""

    # Of processor time; None: more than a grammar may take.
    seconds: float | None
    # When it is forgotten.
    until: float


class Grammars:
    """The known times of grammars, by digest, and the grammars that are being compiled.

    A grammar that is not known to be short may take long. Only a few workers compile such grammars
    at once, for all scopes together. An unknown grammar is compiled by one worker at a time. Its
    time is then known for KNOWN_SECONDS. Beyond MAX_KNOWN the oldest is forgotten.
    """

    def __init__(self, most: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """At most `most` workers at once compile grammars that may take long."""
        self._most = most
        self._monotonic = monotonic
        self._known = OrderedDict[bytes, _Known]()
        self._compiling = Counter[bytes]()
        self._reserved = Counter[bytes]()
        # The requests that wait until their grammar may be compiled. They go before all others.
        self.num_waiting = 0

    def may_begin(self, digest: bytes) -> bool:
        """Whether a worker could now serve a request that waits with this grammar."""
        return self._is_decided(digest) or self._has_room(digest)

    def reserve(self, digest: bytes) -> None:
        """Note that a waiting request got a worker for this grammar. `end_reservation` must
        follow."""
        self._reserved[digest] += 1

    def end_reservation(self, digest: bytes) -> None:
        """Note that the worker has begun to compile the grammar, or never will."""
        self._reserved[digest] -= self._reserved[digest] > 0
        self._reserved += Counter()  # drops what is at zero

    def begin(self, digest: bytes, *, any_grammar: bool) -> MayCompile:
        """Whether a worker may compile the grammar now. `end` or `leave` must follow a `yes`.

        Without `any_grammar` the worker compiles only grammars that are known to be short.
        """
        verdict = self._verdict(digest, any_grammar=any_grammar)
        self.end_reservation(digest)
        if verdict == "yes" and not self._is_short(digest):
            self._compiling[digest] += 1
        return MayCompile(verdict)

    def end(self, digest: bytes, *, seconds: float | None) -> None:
        """Note that the worker has compiled the grammar.

        `seconds` is its processor time; None: more than a grammar may take.
        """
        self.leave(digest)
        self._known[digest] = _Known(seconds, self._monotonic() + KNOWN_SECONDS)
        self._known.move_to_end(digest)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def leave(self, digest: bytes) -> None:
        """Note that the worker no longer compiles the grammar, and that its time is not known."""
        if self._compiling[digest]:
            self._compiling[digest] -= 1
        self._compiling += Counter()  # drops what is at zero

    def _verdict(self, digest: bytes, *, any_grammar: bool) -> Verdict:
        known = self._current(digest)
        if known is not None and known.seconds is None:
            return "costly"
        if self._is_short(digest):
            return "yes"
        is_its_turn = digest in self._reserved or (not self.num_waiting and self._has_room(digest))
        return "yes" if any_grammar and is_its_turn else "later"

    def _has_room(self, digest: bytes) -> bool:
        num_taken = self._compiling.total() + self._reserved.total()
        is_tried = digest in self._compiling or digest in self._reserved
        return num_taken < self._most and not (is_tried and self._current(digest) is None)

    def _is_decided(self, digest: bytes) -> bool:
        known = self._current(digest)
        return known is not None and (known.seconds is None or known.seconds <= SHORT_SECONDS)

    def _is_short(self, digest: bytes) -> bool:
        known = self._current(digest)
        return known is not None and known.seconds is not None and known.seconds <= SHORT_SECONDS

    def _current(self, digest: bytes) -> _Known | None:
        known = self._known.get(digest)
        return known if known is not None and known.until > self._monotonic() else None


class ScopeLoads:
    """The time of workers that each scope used of late, as a leaky bucket for each scope.

    A scope's time fades by SCOPE_SHARE seconds in each second. All moments are of one clock.
    """

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}
        self._running: dict[str, list[float]] = {}

    def begin(self, scope: str, now: float) -> None:
        """Note that a worker begins to work for the scope."""
        self._running.setdefault(scope, []).append(now)

    def end(self, scope: str, now: float) -> None:
        """Note that a worker has ended its work for the scope. The oldest one counts as ended."""
        began = self._running[scope].pop(0)
        if not self._running[scope]:
            del self._running[scope]
        used = self._faded(scope, now) + now - began
        self._used[scope] = used, now
        self._used = {name: load for name, load in self._used.items() if self._faded(name, now)}

    def is_slow(self, scope: str, now: float) -> bool:
        running = sum(now - began for began in self._running.get(scope, ()))
        return self._faded(scope, now) + running > SLOW_SECONDS

    def num_slow(self, now: float) -> int:
        """The number of workers that work for slow scopes."""
        running = self._running.items()
        return sum(len(begun) for scope, begun in running if self.is_slow(scope, now))

    def _faded(self, scope: str, now: float) -> float:
        used, at = self._used.get(scope, (0.0, now))
        return max(used - (now - at) * SCOPE_SHARE, 0.0)
