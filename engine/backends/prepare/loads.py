"""Who may have a worker, by the time that grammars are known to take and that scopes used of late.
Pure."""

import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from engine.backends.prepare.prepared import MayCompile, Verdict

KNOWN_SECONDS = 600.0
"""How long it is remembered what a grammar takes. A grammar that takes too much is refused without
a try."""
MAX_KNOWN = 4_096
SHORT_SECONDS = 0.2
"""Seconds of the processor. A grammar that takes no more is compiled by any worker, just as texts
are prepared."""
SLOW_SECONDS = 1.0
"""A scope is slow while it has used so many seconds of workers beyond its share of them."""
SCOPE_SHARE = 0.25
"""Seconds of workers that a scope may use in each second without being slow."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What a grammar takes: seconds of the processor, None for more than one may."""

    seconds: float | None
    until: float


class Grammars:
    """What grammars take, by digest, and which of them are being compiled.

    A grammar that is not known to be short may take long. A few workers compile such grammars at
    once, of all scopes together. A grammar that is not known at all is compiled by one worker at a
    time. What was found is known for KNOWN_SECONDS. Beyond MAX_KNOWN the oldest is forgotten.
    """

    def __init__(self, most: int, monotonic: Callable[[], float] = time.monotonic) -> None:
        """At most `most` workers compile at once what may take long."""
        self._most = most
        self._monotonic = monotonic
        self._known = OrderedDict[bytes, _Known]()
        self._compiling = Counter[bytes]()
        self._reserved = Counter[bytes]()
        # Requests that wait until their grammar may be compiled. Nobody goes before them.
        self.num_waiting = 0

    def may_begin(self, digest: bytes) -> bool:
        """Whether a worker is of use to a request that waits with this grammar."""
        return self._is_decided(digest) or self._has_room(digest)

    def reserve(self, digest: bytes) -> None:
        """A worker was given to such a request. `end_reservation` must follow."""
        self._reserved[digest] += 1

    def end_reservation(self, digest: bytes) -> None:
        """The worker has begun to compile, or will not."""
        self._reserved[digest] -= self._reserved[digest] > 0
        self._reserved += Counter()  # drops what is at zero

    def begin(self, digest: bytes, *, any_grammar: bool) -> MayCompile:
        """A worker asks whether to compile. After a `yes` `end` must follow. Without `any_grammar`
        it compiles only what is known to be short.
        """
        verdict = self._verdict(digest, any_grammar=any_grammar)
        self.end_reservation(digest)
        if verdict == "yes" and not self._is_short(digest):
            self._compiling[digest] += 1
        return MayCompile(verdict)

    def end(self, digest: bytes, *, seconds: float | None) -> None:
        """The worker has compiled it in so many seconds of the processor; None: in more than one
        may take."""
        self.leave(digest)
        self._known[digest] = _Known(seconds, self._monotonic() + KNOWN_SECONDS)
        self._known.move_to_end(digest)
        if len(self._known) > MAX_KNOWN:
            self._known.popitem(last=False)

    def leave(self, digest: bytes) -> None:
        """The worker no longer compiles it, and what it takes was not found."""
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
    """How much of the workers each scope used of late: a leaky bucket a scope.

    What a scope used fades by SCOPE_SHARE of a worker. Moments are seconds of one clock.
    """

    def __init__(self) -> None:
        self._used: dict[str, tuple[float, float]] = {}
        self._running: dict[str, list[float]] = {}

    def begin(self, scope: str, now: float) -> None:
        """A worker begins to work for the scope."""
        self._running.setdefault(scope, []).append(now)

    def end(self, scope: str, now: float) -> None:
        """A worker has ended its oldest work for the scope."""
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
        """Workers that work for slow scopes."""
        running = self._running.items()
        return sum(len(begun) for scope, begun in running if self.is_slow(scope, now))

    def _faded(self, scope: str, now: float) -> float:
        used, at = self._used.get(scope, (0.0, now))
        return max(used - (now - at) * SCOPE_SHARE, 0.0)
