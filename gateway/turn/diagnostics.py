"""Cache diagnostics: how a turn's prompt differs from that of the turn a client names.

Fingerprints of recent turns are in memory; those of older ones, of an earlier run or of another
gateway are fetched from the ledger, in the background, while the engine works. Nobody waits for
that: what has not come when the response begins is "unfinished". Turns of another workspace, and
turns whose client did not ask for diagnostics, are not found.
"""

import asyncio
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal

from gateway.base.background import Background
from gateway.base.errors import Overloaded
from gateway.prompt.ask import Ask
from gateway.prompt.fingerprint import Divergence, Fingerprint, compare, pack, unpack

MAX_TURNS = 10_000
# A turn is in the ledger a moment after it is closed: one that is not there is asked for once more.
_SETTLE_SECONDS = 1.0
_MAX_FETCHES = 32
_TURN_ID = re.compile(r"msg_[0-9a-f]{28}")

Find = Callable[[str, str], Awaitable[bytes | None]]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """`divergence` None means that there is none, where `found` is "compared"."""

    found: Literal["compared", "not_found", "unfinished"]
    divergence: Divergence | None = None


class Comparison:
    """What is known of the earlier turn, or the task that fetches it."""

    def __init__(self, earlier: "asyncio.Task[bytes | None] | bytes | None") -> None:
        self._earlier = earlier

    def diagnosis(self, later: Fingerprint) -> Diagnosis:
        """As of now; never waits."""
        earlier = self._earlier
        if isinstance(earlier, asyncio.Task):
            if not earlier.done() or earlier.cancelled() or earlier.exception() is not None:
                return Diagnosis("unfinished")
            earlier = earlier.result()
        if earlier is None or not (fingerprint := unpack(earlier)).is_shared:
            return Diagnosis("not_found")
        return Diagnosis("compared", compare(fingerprint, later))


class PromptComparer:
    """`find` fetches a packed fingerprint from the ledger, by turn id and workspace."""

    def __init__(self, find: Find, background: Background, max_turns: int = MAX_TURNS) -> None:
        self._find = find
        self._background = background
        self._max_turns = max_turns
        self._recent: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._num_fetches = 0

    def begin(self, ask: Ask) -> Comparison | None:
        """Start comparing; None where nothing was asked for, or this is a first turn."""
        turn_id = ask.comparison.previous
        if not ask.comparison.is_wanted or turn_id is None:
            return None
        if _TURN_ID.fullmatch(turn_id) is None:
            return Comparison(None)
        workspace, packed = self._recent.get(turn_id, (None, None))
        if packed is not None and workspace == ask.principal.workspace:
            return Comparison(packed)
        # Another workspace's turn takes the way of one that nobody knows, delays and all.
        fetching = self._fetch(ask.principal.workspace, turn_id)
        return Comparison(self._background.spawn(fetching, "fetch fingerprint"))

    def remember(self, workspace: str, turn_id: str, fingerprint: Fingerprint) -> bytes:
        """Keep a turn whose response begins; return what is to be stored of it."""
        packed = pack(fingerprint)
        self._keep(turn_id, workspace, packed)
        return packed

    def _keep(self, turn_id: str, workspace: str, packed: bytes) -> None:
        self._recent[turn_id] = workspace, packed
        while len(self._recent) > self._max_turns:
            self._recent.popitem(last=False)

    async def _fetch(self, workspace: str, turn_id: str) -> bytes | None:
        """Raise Overloaded instead of burdening the database with many of these."""
        if self._num_fetches >= _MAX_FETCHES:
            raise Overloaded
        self._num_fetches += 1
        try:
            found = await self._find(turn_id, workspace)
            if found is None:
                await asyncio.sleep(_SETTLE_SECONDS)
                found = await self._find(turn_id, workspace)
            if found is not None:
                self._keep(turn_id, workspace, found)
            return found
        finally:
            self._num_fetches -= 1
