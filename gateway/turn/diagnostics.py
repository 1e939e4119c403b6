"""Why a turn missed: how its prompt differs from an earlier turn's, and who held its prefix.

The client names the earlier turn. Fingerprints of recent turns are in memory; others are fetched
from the ledger while the engine works, and the response does not wait for them ("unfinished").
Turns of another workspace, or whose client did not ask for diagnostics, are not found.

Where a client asks for no comparison, the newest turns of the same key may still tell the reason of
a miss. The ledger, which outlives this process, may tell who held the prefix.
"""

import asyncio
import re
from collections import OrderedDict, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple

from engine.protocol import TTLS, Name, Started
from gateway.base.background import Background
from gateway.base.errors import Overloaded
from gateway.ledger.reads.prefixes import PrefixUse
from gateway.prompt.ask import Ask
from gateway.prompt.fingerprint import (
    Diagnosis,
    Divergence,
    Fingerprint,
    are_versions,
    compare,
    pack,
    shared_bytes,
    unpack,
)
from gateway.structs.misses import SECTION_OF, HolderReason, Section

MAX_TURNS = 10_000
MAX_NAMES_KNOWN = 100_000
# A turn reaches the ledger a moment after its close, so a missing one is looked up once more.
_SETTLE_SECONDS = 1.0
_MAX_FETCHES = 32
_TURN_ID = re.compile(r"msg_[0-9a-f]{28}")

_RECALL_SECONDS = 0.5
_MAX_RECALLED = 8
"""The most prefixes of a prompt that the ledger is asked for: the deepest ones. The ledger knows an
earlier turn by its deepest marked prefix."""
_MAX_OF_KEY = 8
"""How many of a key's newest prompts are remembered for comparison."""
_MAX_KEYS = 1000

_UNASKED: tuple[Section, ...] = ("tools", "system")
"""The sections whose changes are reported even if the client asked for no comparison."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """The earlier turn's fingerprint, or the task that fetches it."""

    earlier: asyncio.Task[bytes | None] | bytes | None

    def diagnosis(self, later: Fingerprint) -> Diagnosis:
        """The diagnosis at this moment. It never waits."""
        earlier = self.earlier
        if isinstance(earlier, asyncio.Task):
            if not earlier.done() or earlier.cancelled() or earlier.exception() is not None:
                return Diagnosis("unfinished")
            earlier = earlier.result()
        if earlier is None:
            return Diagnosis("not_found")
        fingerprint = unpack(earlier)
        if not fingerprint.is_shared:
            return Diagnosis("not_found")
        return Diagnosis("compared", compare(fingerprint, later))


@dataclass(slots=True)
class PromptComparer:
    """Compares a turn's prompt with an earlier one."""

    # Fetches a packed fingerprint from the ledger, by turn id and workspace.
    find: Callable[[str, str], Awaitable[bytes | None]]
    background: Background
    # The workspace and the packed fingerprint of recent turns, by turn id.
    recent: OrderedDict[str, tuple[str, bytes]] = field(default_factory=OrderedDict)
    # The packed fingerprints of each key's newest turns, by the key's id.
    newest_by_key: OrderedDict[str, deque[bytes]] = field(default_factory=OrderedDict)
    # How many fetches from the ledger run.
    num_fetches: int = 0

    def begin(self, ask: Ask) -> Comparison | None:
        """Start a comparison. None if the client asked for none, or if this is a first turn."""
        turn_id = ask.comparison.previous
        if not ask.comparison.is_wanted or turn_id is None:
            return None
        if _TURN_ID.fullmatch(turn_id) is None:
            return Comparison(None)
        workspace = ask.principal.workspace
        owner, packed = self.recent.get(turn_id, (None, None))
        if packed is not None and owner == workspace:
            return Comparison(packed)

        async def fetch() -> bytes | None:
            if self.num_fetches >= _MAX_FETCHES:
                raise Overloaded
            self.num_fetches += 1
            try:
                packed = await self.find(turn_id, workspace)
                if packed is None:
                    await asyncio.sleep(_SETTLE_SECONDS)
                    packed = await self.find(turn_id, workspace)
                if packed is not None:
                    self._keep(turn_id, workspace, packed)
                return packed
            finally:
                self.num_fetches -= 1

        # A turn of another workspace takes as long as an unknown one.
        return Comparison(self.background.spawn(fetch(), "fetch fingerprint"))

    def remember(
        self, workspace: str, turn_id: str, fingerprint: Fingerprint, key_id: str
    ) -> bytes:
        """Remember a turn whose response begins. Return the fingerprint to store."""
        packed = pack(fingerprint)
        self._keep(turn_id, workspace, packed)
        newest = self.newest_by_key.setdefault(key_id, deque(maxlen=_MAX_OF_KEY))
        newest.append(packed)
        self.newest_by_key.move_to_end(key_id)
        while len(self.newest_by_key) > _MAX_KEYS:
            self.newest_by_key.popitem(last=False)
        return packed

    def changed_since(self, key_id: str, later: Fingerprint) -> Divergence | None:
        """How the tools or the system prompt changed since the key's nearest recent prompt.

        The nearest prompt shares the longest beginning with `later`. If none shares a beginning, it
        is the newest other version of `later`. None where there is no nearest prompt, because the
        key may send unrelated prompts. None also where only messages differ, because that may be
        another conversation.
        """
        earlier = [unpack(packed) for packed in self.newest_by_key.get(key_id, ())]
        nearest = max(
            earlier, key=lambda fingerprint: shared_bytes(fingerprint, later), default=None
        )
        if nearest is not None and not shared_bytes(nearest, later):
            versions = (other for other in reversed(earlier) if are_versions(other, later))
            nearest = next(versions, None)
        if nearest is None:
            return None
        divergence = compare(nearest, later)
        if divergence is None or SECTION_OF[divergence.kind] not in _UNASKED:
            return None
        return divergence

    def _keep(self, turn_id: str, workspace: str, packed: bytes) -> None:
        self.recent[turn_id] = workspace, packed
        while len(self.recent) > MAX_TURNS:
            self.recent.popitem(last=False)


@dataclass(slots=True)
class PrefixRecaller:
    """Asks the ledger for the newest turn that used a prefix.

    The number of questions at once and their time are bounded, because a first token waits for the
    answer.
    """

    # Fetches the newest use of one of these prefixes in a workspace.
    find: Callable[[str, Sequence[str]], Awaitable[PrefixUse | None]]
    background: Background
    num_running: int = 0

    async def last_use(self, workspace: str, prefixes: Sequence[str]) -> PrefixUse | None:
        """The newest use of one of the prefixes, which come deepest first. None where the ledger
        knows none or does not answer in time, or where too many questions run."""
        if self.num_running >= _MAX_FETCHES:
            return None

        async def look() -> PrefixUse | None:
            self.num_running += 1
            try:
                return await self.find(workspace, prefixes[:_MAX_RECALLED])
            finally:
                self.num_running -= 1

        task = self.background.spawn(look(), "recall a prefix")
        done, _ = await asyncio.wait({task}, timeout=_RECALL_SECONDS)
        is_known = bool(done) and not task.cancelled() and task.exception() is None
        use: PrefixUse | None = task.result() if is_known else None
        return use


class _Holder(NamedTuple):
    """An entry on `engine` in one epoch, and its end on the monotonic clock."""

    engine: str
    epoch: str
    until: float


@dataclass(frozen=True, slots=True)
class LastHolders:
    """The engine that last held each prefix, and until when, as this gateway's responses reported.

    It explains why a turn missed. Routing does not use it.
    """

    # An engine's epoch by its name; None where it is not known.
    epoch_of: Callable[[str], str | None]
    max_names: int = MAX_NAMES_KNOWN
    # The last holder, by model and prefix.
    holders: OrderedDict[tuple[str, str], _Holder] = field(default_factory=OrderedDict)
    # The model that a prefix last came with.
    models: OrderedDict[str, str] = field(default_factory=OrderedDict)

    def learn(
        self, engine: str, model: str, started: Started, names: Iterable[Name], now: float
    ) -> None:
        """Remember the entries of a response."""
        digests = {name.segment: name.digest for name in names if name.characters is None}
        for report in started.breakpoints:
            digest = digests.get(report.segment)
            if digest is None or report.state == "none":
                continue
            # An entry without a lease has no promised end. It lives as long as its TTL at most.
            seconds = report.expires_in_seconds or TTLS[report.ttl or "5m"].seconds
            self._keep(model, digest, _Holder(engine, started.epoch, now + seconds))

    def recall(self, use: PrefixUse, at: datetime, now: float) -> None:
        """Remember a use that the ledger knows, unless this process knows the prefix. `at` is `now`
        on the wall clock."""
        if not self.knows([use.prefix]):
            seconds_left = use.seconds - (at - use.opened_at).total_seconds()
            self._keep(use.model, use.prefix, _Holder(use.engine, use.epoch, now + seconds_left))

    def knows(self, digests: Iterable[str]) -> bool:
        return any(digest in self.models for digest in digests)

    def _keep(self, model: str, digest: str, holder: _Holder) -> None:
        self.holders[model, digest] = holder
        self.holders.move_to_end((model, digest))
        self.models[digest] = model
        self.models.move_to_end(digest)
        for kept in (self.holders, self.models):
            while len(kept) > self.max_names:
                kept.popitem(last=False)

    def explain(
        self, engine: str, model: str, epoch: str, digests: Sequence[str], now: float
    ) -> HolderReason | None:
        """Why `engine`, in this epoch, may not hold these prefixes for `model`.

        The prefixes come deepest first. The first one that is known decides. None if this gateway
        knows no better reason than the engine.
        """
        for digest in digests:
            holder = self.holders.get((model, digest))
            if holder is None and self.models.get(digest, model) != model:
                # No two models share a prefix, wherever it stands.
                return "model_changed"
            if holder is None:
                continue
            current = epoch if holder.engine == engine else self.epoch_of(holder.engine)
            if holder.engine == engine and holder.epoch == current:
                return None
            if holder.until <= now:
                return "ttl_expired"
            if current is not None and holder.epoch != current:
                return "engine_restart"
            return "routed_elsewhere"
        return None
