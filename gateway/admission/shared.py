"""Limits of workspaces that hold over all gateways: they share one state a workspace in a store.

A turn of a limited workspace is admitted inside one locked exchange with the store: load the state
and add what was taken and given back here since the last one, decide as a single gateway does
(`accounts.py`) with what the others hold counted, write the state. All turns that wait share the
next exchange. What a gateway holds counts for `_STALE_SECONDS` after it was last told, so a killed
one's places come back. While the store is away, limits hold per gateway (`is_shared` says so), and
what was taken is told when it is back.
"""

import asyncio
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace

import msgspec

from gateway.admission.accounts import (
    CONCURRENT,
    Account,
    TurnClaim,
    Untold,
    WorkspaceLimits,
)
from gateway.admission.rates import TokenBucket
from gateway.base.background import pause
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError, RateLimited, SpendLimitReached
from gateway.base.grants import NO_LIMITS
from gateway.base.logs import get_logger
from gateway.ledger.access import Exchange, SharedLimitsTable

_TICK_SECONDS = 5.0
_STALE_SECONDS = 20.0
_GONE_SECONDS = 3600.0
"""So long the money of turns counts whose gateway was killed: what they cost is told when it is
back."""
_RETRY_SECONDS = 1.0
_LEAVING_SECONDS = 0.1
"""A turn that failed elsewhere may not have told yet that it gave its place back."""
MAX_TOLD = 1000
"""The most workspaces of one exchange."""


class GatewayHolds(msgspec.Struct, frozen=True):
    """What one gateway holds: turns in flight, and nano-dollars that they may cost."""

    in_flight: int
    reserved: int
    seen_at: float


class SharedState(msgspec.Struct, frozen=True):
    """What all gateways share of one workspace."""

    # The buckets are on the store's clock.
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    # For example "2026-11".
    month: str = ""
    # Of the month, in nano-dollars.
    spent: int = 0
    # By gateway.
    held: dict[str, GatewayHolds] = {}


@dataclass(slots=True)
class _Waiting:
    claim: TurnClaim
    failure: GatewayError | None = None
    taken: asyncio.Future[None] = field(
        default_factory=lambda: asyncio.get_running_loop().create_future()
    )

    @property
    def workspace(self) -> str:
        return self.claim.principal.workspace

    def decide(self, limits: WorkspaceLimits) -> None:
        try:
            limits.take(self.claim)
        except GatewayError as error:
            self.failure = error

    def answer(self, limits: WorkspaceLimits) -> None:
        """Wake the turn. One that is gone gives its place back."""
        if not self.taken.cancelled():
            if self.failure is None:
                self.taken.set_result(None)
            else:
                self.taken.set_exception(self.failure)
        elif self.failure is None:
            limits.leave(self.claim.turn_id, self.workspace, is_open=False)


class SharedLimits:
    def __init__(
        self, limits: WorkspaceLimits, store: SharedLimitsTable, gateway: str, clock: Clock
    ) -> None:
        """`gateway` is this gateway's id among those of the store."""
        self.is_shared = False
        """False while the store is away, and before the first exchange."""
        self._limits = limits
        self._store = store
        self._gateway = gateway
        self._clock = clock
        self._waiting: list[_Waiting] = []
        self._telling: list[asyncio.Future[None]] = []
        # Workspaces with turns here, and those of which others don't know the newest.
        self._known: set[str] = set()
        self._changed: set[str] = set()
        self._wake = asyncio.Event()

        def note(workspace: str, is_earlier: bool) -> None:
            # Others hold money for a turn of an earlier run until its cost is told.
            if is_earlier or workspace in self._known:
                self._changed.add(workspace)
                self._wake.set()

        limits.changed = note

    async def take(self, claim: TurnClaim) -> None:
        """As `WorkspaceLimits.take`, over all gateways."""
        if claim.principal.limits == NO_LIMITS:
            self._limits.take(claim)
            return
        try:
            await self._take(claim)
        except (RateLimited, SpendLimitReached) as error:
            # What others hold may be given back in this moment.
            account = self._limits.account(claim.principal.workspace)
            is_rate = isinstance(error, RateLimited) and error.what != CONCURRENT
            if is_rate or not (account.in_flight_elsewhere or account.reserved_elsewhere):
                raise
            await asyncio.sleep(_LEAVING_SECONDS)
            await self._take(claim)

    async def _take(self, claim: TurnClaim) -> None:
        workspace = claim.principal.workspace
        self._known.add(workspace)
        if not self.is_shared:
            self._changed.add(workspace)
            self._limits.take(claim)
            return
        waiting = _Waiting(claim)
        self._waiting.append(waiting)
        self._wake.set()
        try:
            await waiting.taken
        except asyncio.CancelledError:
            # It was taken in the same moment.
            if not waiting.taken.cancelled() and waiting.taken.exception() is None:
                self._limits.leave(claim.turn_id, workspace, is_open=False)
            raise

    async def told(self, workspace: str) -> None:
        """Wait until other gateways can know that a turn has given its place back. A client that
        asks another gateway next is not refused for a turn that it has the answer of."""
        limits = self._limits.account(workspace).limits
        is_held = limits.max_concurrency is not None or limits.monthly_spend is not None
        if self.is_shared and is_held:
            written: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._telling.append(written)
            self._changed.add(workspace)
            self._wake.set()
            await written

    async def run(self, stopping: asyncio.Event) -> None:
        """Exchange whenever a turn waits or something has changed, else every few seconds."""
        ended = asyncio.create_task(stopping.wait())
        ended.add_done_callback(lambda _: self._wake.set())
        due = -math.inf
        try:
            while not stopping.is_set():
                now = self._clock.monotonic()
                if now >= due:
                    self._changed |= self._known
                    due = now + _TICK_SECONDS
                elif not (self._waiting or self._changed):
                    self._wake.clear()
                    with suppress(TimeoutError):
                        await asyncio.wait_for(self._wake.wait(), due - now)
                    continue
                if not await self._exchange():
                    await pause(stopping, _RETRY_SECONDS)
            if self.is_shared and self._changed:
                await self._exchange()  # others hold money for the last turns until they are told
        finally:
            ended.cancel()
            # Nobody may wait for an exchange that does not come.
            self._say_shared(False, "the gateway stops, or this loop failed")
            self._answer([], [])

    async def _exchange(self) -> bool:
        """One exchange with the store; False if it is away. Every waiting turn has its answer."""
        waiting = self._waiting
        self._waiting = []
        telling = self._telling
        self._telling = []
        waiting = [request for request in waiting if not request.taken.cancelled()]
        names = {request.workspace for request in waiting}
        changed = sorted(self._changed - names)[: max(0, MAX_TOLD - len(names))]
        names.update(changed)
        self._changed -= names
        decided = False
        try:
            async with self._store.exchange(sorted(names)) as page:
                for joining in waiting:  # its limits may have changed
                    self._limits.account(joining.workspace, joining.claim.principal.limits)
                for name in names:
                    self._load(name, page)
                for joining in waiting:
                    joining.decide(self._limits)
                decided = True
                written = {name: self._write(name, page) for name in names}
            for name, of in written.items():
                untold = self._limits.account(name).untold
                untold.requests -= of.requests
                untold.tokens -= of.tokens
                untold.spent -= of.spent
            self._say_shared(True)
        except GatewayError as error:
            self._changed |= names
            self._say_shared(False, str(error))
        finally:
            if not decided:
                for joining in waiting:
                    joining.decide(self._limits)
            self._answer(waiting, telling)
        return self.is_shared

    def _answer(self, waiting: list[_Waiting], telling: list[asyncio.Future[None]]) -> None:
        """Wake who took part, and everybody who came meanwhile while limits are not shared."""
        if not self.is_shared:
            late = self._waiting
            self._waiting = []
            for request in late:
                request.decide(self._limits)
            waiting = [*waiting, *late]
            telling = [*telling, *self._telling]
            self._telling = []
        for request in waiting:
            request.answer(self._limits)
        for written in telling:
            if not written.done():
                written.set_result(None)

    def _others(self, state: SharedState, now: float) -> dict[str, GatewayHolds]:
        return {
            gateway: held
            for gateway, held in state.held.items()
            if gateway != self._gateway and now - held.seen_at < _GONE_SECONDS
        }

    def _load(self, workspace: str, page: Exchange) -> None:
        """Make the account what the state says, with what was taken here since."""
        state = _read(page.states[workspace])
        account = self._limits.this_months(self._limits.account(workspace))
        shift = self._clock.monotonic() - page.now
        untold = account.untold
        _take_over(account.requests, state.requests, untold.requests, shift)
        _take_over(account.tokens, state.tokens, untold.tokens, shift)
        if state.month == _name(account):
            account.spent = max(account.spent, state.spent + untold.spent)
        others = self._others(state, page.now).values()
        fresh = [held for held in others if page.now - held.seen_at < _STALE_SECONDS]
        account.in_flight_elsewhere = sum(held.in_flight for held in fresh)
        account.reserved_elsewhere = sum(held.reserved for held in others)

    def _write(self, workspace: str, page: Exchange) -> Untold:
        """Put the account into the state; return what of it was not told before."""
        state = _read(page.states[workspace])
        account = self._limits.account(workspace)
        shift = page.now - self._clock.monotonic()
        held = self._others(state, page.now)
        if account.num_uncounted or account.in_flight:
            held[self._gateway] = GatewayHolds(account.in_flight, account.reserved, page.now)
            self._known.add(workspace)
        else:
            self._known.discard(workspace)
        written = SharedState(
            requests=_at_store(account.requests, shift) or state.requests,
            tokens=_at_store(account.tokens, shift) or state.tokens,
            month=_name(account),
            spent=account.spent,
            held=held,
        )
        page.states[workspace] = msgspec.json.encode(written).decode()
        return replace(account.untold)

    def _say_shared(self, is_shared: bool, reason: str = "") -> None:
        if is_shared != self.is_shared:
            log = get_logger("limits")
            if is_shared:
                log.info("limits_shared")
            else:
                log.warning("limits_not_shared", error=reason)
        self.is_shared = is_shared


def _read(state: str) -> SharedState:
    """A state that can't be read, as an empty one, is a new one."""
    try:
        return msgspec.json.decode(state, type=SharedState)
    except msgspec.DecodeError:
        return SharedState()


def _name(account: Account) -> str:
    return "" if account.month is None else account.month.strftime("%Y-%m")


def _at_store(bucket: TokenBucket | None, shift: float) -> TokenBucket | None:
    return bucket and replace(bucket, at=bucket.at + shift)


def _take_over(
    bucket: TokenBucket | None, shared: TokenBucket | None, untold: float, shift: float
) -> None:
    """Make a bucket the shared one, with what was taken from this one since."""
    if bucket is None or shared is None:
        return
    per_minute = bucket.per_minute
    now = bucket.at
    bucket.per_minute = shared.per_minute
    bucket.level = shared.level
    bucket.at = shared.at + shift
    bucket.resize(per_minute, now)
    bucket.take(untold, now)
