"""The limits of workspaces: requests and tokens a minute, turns at one time, money a month. Pure.

A turn's tokens are known only when it ends, so its beginning reserves some. These are the estimate
of the `Ask`, times the share of such estimates that the workspace's turns lately used (reads do not
count). They are at most the whole bucket. `count_used` corrects the reservation with the engine's
counts. A bucket in debt makes later turns wait. A month's money is strict: a turn begins only if
there is enough left for the most that it and the running turns can cost. `shared.py` makes the
limits hold over several gateways.
"""

import asyncio
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import NamedTuple

from gateway.admission.fair_queue import MAX_TURNS
from gateway.admission.keyring import KeyRing
from gateway.admission.rates import TokenBucket
from gateway.base.background import repeat
from gateway.base.clock import Clock
from gateway.base.errors import Overloaded, RateLimited, SpendLimitReached
from gateway.base.grants import NO_LIMITS, Limits, RateStatus, RateStatuses
from gateway.base.record import TurnRecord
from gateway.ledger.access import Workspaces
from gateway.prices.price import NanoDollars, dollars
from gateway.prompt.ask import Principal

MAX_IN_FLIGHT = 2000
"""The most turns at engines. Further turns may wait in the queue (`engine_queue.py`)."""
MAX_ADMITTED = MAX_IN_FLIGHT + MAX_TURNS
MAX_BACKLOG = 1_000_000
MAX_ACCOUNTS = 10_000
CONCURRENT = "concurrent requests"
SPEND_POLL_SECONDS = 30.0
_SPEND_TICK_SECONDS = 2.0
_LEARNING = 0.25
_MAX_MONTHS = 3
"""How many months' costs are remembered, in case the wall clock jumps ahead and back."""


@dataclass(slots=True)
class Untold:
    """What was taken here since the last exchange with other gateways; negative if given back."""

    requests: float = 0.0
    tokens: float = 0.0
    spent: int = 0


@dataclass(slots=True)
class Account:
    """One workspace's buckets, turns in flight, and costs."""

    limits: Limits = NO_LIMITS
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    # Turns that hold a place.
    in_flight: int = 0
    # Turns whose use is not counted yet.
    num_uncounted: int = 0
    # The share of their estimates that turns lately used.
    counted_share: float = 1.0
    # The month of `spent`.
    month: datetime | None = None
    # The month's cost so far, in nano-dollars.
    spent: int = 0
    # The most that the uncounted turns may cost, in nano-dollars.
    reserved: int = 0
    # The costs of other months, which a jump of the wall clock may bring back.
    other_months: dict[datetime, int] = field(default_factory=dict)
    # What other gateways hold (`shared.py`).
    in_flight_elsewhere: int = 0
    reserved_elsewhere: int = 0
    # What other gateways do not know yet.
    untold: Untold = field(default_factory=Untold)

    def is_idle(self, now: float) -> bool:
        """Whether a new account would be equal."""
        if self.in_flight or self.num_uncounted or self.limits.monthly_spend is not None:
            return False
        buckets = (self.requests, self.tokens)
        return all(bucket is None or bucket.full_in(now) == 0 for bucket in buckets)


class TurnClaim(NamedTuple):
    """What a turn asks of its workspace's account."""

    turn_id: str
    principal: Principal
    # The tokens that it will use.
    estimate: int
    # How many turns of the journal the ledger does not have yet.
    backlog: int = 0
    # The most that it can cost, in nano-dollars.
    most_cost: int = 0


class WorkspaceLimits:
    def __init__(self, monotonic: Callable[[], float], wall: Callable[[], datetime]) -> None:
        self.in_flight = 0
        self._monotonic = monotonic
        self._wall = wall
        self._month = month_of(wall())
        self.changed: Callable[[str, bool], None] = lambda workspace, is_earlier: None
        """Called with a workspace whose turns in flight, tokens or cost have changed, and whether a
        turn of an earlier run changed them."""
        self._accounts: OrderedDict[str, Account] = OrderedDict()
        # The claim of each turn, and the tokens that were taken for it, by turn id.
        self._reservations: dict[str, tuple[TurnClaim, int]] = {}

    def take(self, claim: TurnClaim) -> None:
        """Take a turn's place until `leave`. Raise Overloaded, RateLimited or SpendLimitReached,
        with nothing taken."""
        principal = claim.principal
        backlog = claim.backlog
        most_cost = claim.most_cost
        if self.in_flight >= MAX_ADMITTED or backlog >= MAX_BACKLOG:
            raise Overloaded
        workspace = principal.workspace
        limits = principal.limits
        now = self._monotonic()
        account = self.account(workspace, limits)
        reserved = 0
        if limits.tokens_per_minute is not None:
            expected = math.ceil(claim.estimate * account.counted_share)
            reserved = min(max(1, expected), limits.tokens_per_minute)
        most = limits.monthly_spend
        if most is not None:
            spent = self.this_months(account).spent
            promised = account.reserved + account.reserved_elsewhere + most_cost
            if spent >= most:
                raise SpendLimitReached
            if spent + promised > most:
                raise SpendLimitReached(_would_exceed(most, spent, promised))
        in_flight = account.in_flight + account.in_flight_elsewhere
        if limits.max_concurrency is not None and in_flight >= limits.max_concurrency:
            raise RateLimited(CONCURRENT, limits.max_concurrency, 1)
        seconds = 0.0
        what = ""
        limit = 0
        for name, bucket, amount in (
            ("requests per minute", account.requests, 1),
            ("tokens per minute", account.tokens, reserved),
        ):
            if bucket is None:
                continue
            wait = bucket.wait(amount, now)
            if wait > seconds:
                seconds = wait
                what = name
                limit = bucket.per_minute
        if seconds > 0:
            raise RateLimited(what, limit, max(1, math.ceil(seconds)))
        # Without a limit nothing is counted, so a limit that is set later begins without debt.
        if account.requests is not None:
            account.requests.take(1, now)
            account.untold.requests += 1
        if account.tokens is not None:
            account.tokens.take(reserved, now)
            account.untold.tokens += reserved
        account.reserved += most_cost
        self._reservations[claim.turn_id] = claim, reserved
        self.in_flight += 1
        account.in_flight += 1
        account.num_uncounted += 1

    def leave(self, turn_id: str, workspace: str, *, is_open: bool) -> None:
        """Give a turn's place back. With `is_open` the turn is in the journal, and its close counts
        its use."""
        self.in_flight -= 1
        self.account(workspace).in_flight -= 1
        if not is_open:
            self._settle(turn_id, 0)
        self.changed(workspace, False)

    def count_used(self, record: TurnRecord) -> None:
        """Count the use and the cost of a closed turn, which may be of an earlier run."""
        used = record.input_tokens + record.written_tokens + record.output_tokens
        is_earlier = record.id not in self._reservations
        self._settle(record.id, used)
        if record.cost:
            account = self.this_months(self.account(record.workspace))
            if account.month == month_of(record.opened_at):
                account.spent += record.cost
                account.untold.spent += record.cost
        self.changed(record.workspace, is_earlier)

    def learn_spend(self, month: datetime, spent: Mapping[str, int]) -> None:
        """Take in the ledger's costs of this month, by workspace, in nano-dollars. They are those
        of all gateways. The larger of its cost and ours counts, so no turn counts twice."""
        for workspace, amount in spent.items():
            account = self.this_months(self.account(workspace))
            if account.month == month:
                account.spent = max(account.spent, amount)

    def rates(self, principal: Principal) -> RateStatuses:
        """How much of its limits the workspace has left; None for a limit that it does not have."""
        now = self._monotonic()
        account = self.account(principal.workspace, principal.limits)

        def status_of(bucket: TokenBucket | None) -> RateStatus | None:
            if bucket is None:
                return None
            return RateStatus(bucket.per_minute, bucket.remaining(now), bucket.full_in(now))

        return RateStatuses(status_of(account.requests), status_of(account.tokens))

    def _settle(self, turn_id: str, counted: int) -> None:
        """Replace a turn's reservation by its counted tokens. A second call does nothing."""
        reservation = self._reservations.pop(turn_id, None)
        if reservation is None:
            return
        claim, reserved = reservation
        account = self.account(claim.principal.workspace)
        account.num_uncounted -= 1
        account.reserved -= claim.most_cost
        if account.tokens is not None:
            account.untold.tokens += counted - reserved
            account.tokens.take(counted - reserved, self._monotonic())
        if counted:
            share = min(1.0, counted / max(1, claim.estimate))
            account.counted_share += _LEARNING * (share - account.counted_share)

    def account(self, workspace: str, limits: Limits | None = None) -> Account:
        """The workspace's account. It takes `limits` over if they have changed."""
        account = self._accounts.get(workspace)
        now = self._monotonic()
        if account is None:
            surplus = len(self._accounts) + 1 - MAX_ACCOUNTS
            if surplus > 0:  # forget idle ones, longest unused first
                idle = [name for name, account in self._accounts.items() if account.is_idle(now)]
                for name in idle[:surplus]:
                    del self._accounts[name]
            account = Account()
            self._accounts[workspace] = account
        self._accounts.move_to_end(workspace)
        if limits is not None and limits != account.limits:
            account.limits = limits
            account.requests = _resized(account.requests, limits.requests_per_minute, now)
            account.tokens = _resized(account.tokens, limits.tokens_per_minute, now)
        return account

    def this_months(self, account: Account) -> Account:
        """The account, with the cost of this month. Call this before each read or change of the
        cost."""
        now = self._wall()
        if (now.year, now.month) != (self._month.year, self._month.month):
            self._month = month_of(now)
        if account.month != self._month:
            others = account.other_months
            if account.month is not None:
                others[account.month] = account.spent
            account.month = self._month
            account.spent = others.pop(self._month, 0)
            account.untold.spent = 0
            while len(others) >= _MAX_MONTHS:
                del others[next(iter(others))]
        return account


async def watch_spend(
    workspaces: Workspaces,
    keyring: KeyRing,
    limits: WorkspaceLimits,
    clock: Clock,
    stopping: asyncio.Event,
) -> None:
    """Read from the ledger how much workspaces with a spend limit have spent.

    It is read every half minute, and at once when a workspace gets a limit. So the limit survives a
    restart, and counts the turns that other gateways have drained.
    """
    known_workspaces: set[str] = set()
    read_at = -SPEND_POLL_SECONDS

    async def look() -> None:
        nonlocal known_workspaces, read_at
        now = clock.monotonic()
        all_workspaces = keyring.workspaces.values()
        limited = {
            workspace.id for workspace in all_workspaces if workspace.monthly_spend_nano is not None
        }
        if limited - known_workspaces or (limited and now - read_at >= SPEND_POLL_SECONDS):
            month = month_of(clock.wall())
            limits.learn_spend(month, await workspaces.spent(sorted(limited), month))
            known_workspaces = limited
            read_at = now

    await repeat(stopping, _SPEND_TICK_SECONDS, look, "spend_read_failed")


def _would_exceed(most: int, spent: int, promised: int) -> str:
    """The message of a refusal. Amounts are in nano-dollars; `promised` is the most that this turn
    and the running ones may cost."""
    return (
        "this request would exceed the workspace's spend limit of"
        f" {dollars(NanoDollars(most))} for this month: {dollars(NanoDollars(spent))} is spent, and"
        f" up to {dollars(NanoDollars(promised))} more is reserved for it and for requests that run"
    )


def month_of(moment: datetime) -> datetime:
    """The first moment of the month, in UTC."""
    return moment.astimezone(UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)


def _resized(bucket: TokenBucket | None, limit: int | None, now: float) -> TokenBucket | None:
    if limit is None:
        return None
    if bucket is None:
        return TokenBucket.full(limit, now)
    bucket.resize(limit, now)
    return bucket
