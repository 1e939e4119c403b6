"""Limits of workspaces that hold over all gateways, by one shared state for each workspace.

A turn of a limited workspace is admitted inside one locked exchange with the store:

1. Load the state, and add what was taken and given back here since the last exchange.
2. Decide as a single gateway does (`accounts.py`), and count what the other gateways hold.
3. Write the state.

All turns that wait share the next exchange. What a gateway holds counts for `_STALE_SECONDS` after
its last exchange, so the places of a killed gateway come back. While the store is away, limits hold
per gateway (`is_shared` is False). What was taken is written when the store is back.
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
"""For how long the money that a killed gateway reserved still counts. The cost of its turns is
known when it is back."""
_RETRY_SECONDS = 1.0
_LEAVING_SECONDS = 0.1
"""The pause before a second try: another gateway may just be giving a place back."""
MAX_TOLD = 1000
"""The most workspaces of one exchange."""


class GatewayHolds(msgspec.Struct, frozen=True):
    """What one gateway holds of a workspace's limits."""

    # Turns.
    in_flight: int
    # The nano-dollars that these turns may cost.
    reserved: int
    # The time of its last exchange, on the store's clock.
    seen_at: float


class SharedState(msgspec.Struct, frozen=True):
    """The state that all gateways share of one workspace."""

    # The buckets, on the store's clock.
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    # The month of `spent`, for example "2026-11".
    month: str = ""
    # The month's cost so far, in nano-dollars.
    spent: int = 0
    # What each gateway holds, by its id.
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
        """Wake the turn. If its client is gone, give its place back."""
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
        # Workspaces with turns here.
        self._known: set[str] = set()
        # Workspaces of which other gateways do not know the newest state.
        self._changed: set[str] = set()
        self._wake = asyncio.Event()

        def note(workspace: str, is_earlier: bool) -> None:
            # Other gateways reserve money for an earlier run's turn until they know its cost.
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
            # Another gateway may just be giving back what it holds.
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
            # The place was taken in the same moment.
            if not waiting.taken.cancelled() and waiting.taken.exception() is None:
                self._limits.leave(claim.turn_id, workspace, is_open=False)
            raise

    async def told(self, workspace: str) -> None:
        """Wait until other gateways know that a turn has given its place back. So a client that has
        its answer is not refused at another gateway because of that turn."""
        limits = self._limits.account(workspace).limits
        is_held = limits.max_concurrency is not None or limits.monthly_spend is not None
        if self.is_shared and is_held:
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._telling.append(future)
            self._changed.add(workspace)
            self._wake.set()
            await future

    async def run(self, stopping: asyncio.Event) -> None:
        """Exchange whenever a turn waits or something has changed, else every few seconds."""
        stop_task = asyncio.create_task(stopping.wait())
        stop_task.add_done_callback(lambda _: self._wake.set())
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
                await self._exchange()  # others reserve money for the last turns until then
        finally:
            stop_task.cancel()
            # Nobody may wait for an exchange that does not come.
            self._say_shared(False, "the gateway stops, or this loop failed")
            self._answer([], [])

    async def _exchange(self) -> bool:
        """Exchange with the store once, and answer every waiting turn. Return False if the store is
        away."""
        waiting = self._waiting
        self._waiting = []
        telling = self._telling
        self._telling = []
        waiting = [request for request in waiting if not request.taken.cancelled()]
        names = {request.workspace for request in waiting}
        changed = sorted(self._changed - names)[: max(0, MAX_TOLD - len(names))]
        names.update(changed)
        self._changed -= names
        is_decided = False
        try:
            async with self._store.exchange(sorted(names)) as page:
                for request in waiting:  # its limits may have changed
                    self._limits.account(request.workspace, request.claim.principal.limits)
                for name in names:
                    self._load(name, page)
                for request in waiting:
                    request.decide(self._limits)
                is_decided = True
                amounts_by_name = {name: self._write(name, page) for name in names}
            for name, amounts in amounts_by_name.items():
                untold = self._limits.account(name).untold
                untold.requests -= amounts.requests
                untold.tokens -= amounts.tokens
                untold.spent -= amounts.spent
            self._say_shared(True)
        except GatewayError as error:
            self._changed |= names
            self._say_shared(False, str(error))
        finally:
            if not is_decided:
                for request in waiting:
                    request.decide(self._limits)
            self._answer(waiting, telling)
        return self.is_shared

    def _answer(self, waiting: list[_Waiting], telling: list[asyncio.Future[None]]) -> None:
        """Wake the turns that took part. While limits are not shared, wake later ones as well."""
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
        for future in telling:
            if not future.done():
                future.set_result(None)

    def _others(self, state: SharedState, now: float) -> dict[str, GatewayHolds]:
        return {
            gateway: holding
            for gateway, holding in state.held.items()
            if gateway != self._gateway and now - holding.seen_at < _GONE_SECONDS
        }

    def _load(self, workspace: str, page: Exchange) -> None:
        """Set the account to the state, plus what was taken here since the last exchange."""
        state = _read(page.states[workspace])
        account = self._limits.this_months(self._limits.account(workspace))
        shift = self._clock.monotonic() - page.now
        untold = account.untold
        _take_over(account.requests, state.requests, untold.requests, shift)
        _take_over(account.tokens, state.tokens, untold.tokens, shift)
        if state.month == _name(account):
            account.spent = max(account.spent, state.spent + untold.spent)
        others = self._others(state, page.now).values()
        fresh = [holding for holding in others if page.now - holding.seen_at < _STALE_SECONDS]
        account.in_flight_elsewhere = sum(holding.in_flight for holding in fresh)
        account.reserved_elsewhere = sum(holding.reserved for holding in others)

    def _write(self, workspace: str, page: Exchange) -> Untold:
        """Write the account into the state; return what other gateways learn by it."""
        state = _read(page.states[workspace])
        account = self._limits.account(workspace)
        shift = page.now - self._clock.monotonic()
        holdings = self._others(state, page.now)
        if account.num_uncounted or account.in_flight:
            holdings[self._gateway] = GatewayHolds(account.in_flight, account.reserved, page.now)
            self._known.add(workspace)
        else:
            self._known.discard(workspace)
        new_state = SharedState(
            requests=_at_store(account.requests, shift) or state.requests,
            tokens=_at_store(account.tokens, shift) or state.tokens,
            month=_name(account),
            spent=account.spent,
            held=holdings,
        )
        page.states[workspace] = msgspec.json.encode(new_state).decode()
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
    """Decode a state. An empty or unreadable one counts as new."""
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
    """Set a bucket to the shared one, less what was taken from it since the last exchange."""
    if bucket is None or shared is None:
        return
    per_minute = bucket.per_minute
    now = bucket.at
    bucket.per_minute = shared.per_minute
    bucket.level = shared.level
    bucket.at = shared.at + shift
    bucket.resize(per_minute, now)
    bucket.take(untold, now)
