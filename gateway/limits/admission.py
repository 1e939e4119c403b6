"""Whether a turn may start now: the gateway's own bounds, and the limits of its workspace.

Pure, with injected clocks. A turn's tokens are known when it ends. So its beginning reserves an
estimate, and `count_used` corrects it with the engine's counts:

- The estimate begins as the prompt's bytes / 4 plus `max_tokens`, of which at most 1,024 (`Ask`).
- It is multiplied by the share of their estimates that this workspace's turns lately used. Cache
  reads do not count, so a workspace that mostly reads reserves less.
- It is at most the whole bucket, so a prompt of any length can start when the bucket is full.

A turn that used more than it reserved leaves the bucket in debt, and later turns wait for that. So
one minute may see more than the limit, but the long run does not. Each gateway has its own buckets,
and only the spend is shared by gateways, through the ledger.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import NamedTuple

import msgspec

from gateway.base.errors import Overloaded, RateLimited, SpendLimitReached
from gateway.base.grants import NO_LIMITS, Limits
from gateway.base.record import TurnRecord
from gateway.base.standing import Standing, Standings
from gateway.limits.bucket import TokenBucket
from gateway.limits.fair_queue import MAX_TURNS
from gateway.prompt.ask import Principal

MAX_IN_FLIGHT = 2000
"""The most turns at engines. Further turns may wait in the queue (`gate.py`)."""
MAX_ADMITTED = MAX_IN_FLIGHT + MAX_TURNS
MAX_BACKLOG = 1_000_000
MAX_ACCOUNTS = 10_000
_LEARNING = 0.25
_MAX_MONTHS = 3
"""A wall clock that jumps ahead and back, or to and fro at a month's end, forgets no cost."""


@dataclass(slots=True)
class _Account:
    """One workspace: its buckets, its turns in flight, and the cost of `month` so far.

    `other_months` has the costs of months that the wall clock told before.
    """

    limits: Limits = NO_LIMITS
    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    in_flight: int = 0
    num_uncounted: int = 0
    counted_share: float = 1.0
    month: datetime | None = None
    spent: int = 0
    other_months: dict[datetime, int] = field(default_factory=dict)

    def take_over(self, limits: Limits, now: float) -> None:
        if limits != self.limits:
            self.limits = limits
            self.requests = _resized(self.requests, limits.requests_per_minute, now)
            self.tokens = _resized(self.tokens, limits.tokens_per_minute, now)

    def turn_to(self, month: datetime) -> None:
        if month == self.month:
            return
        if self.month is not None:
            self.other_months[self.month] = self.spent
        self.month, self.spent = month, self.other_months.pop(month, 0)
        while len(self.other_months) >= _MAX_MONTHS:
            del self.other_months[next(iter(self.other_months))]

    def is_idle(self, now: float) -> bool:
        """Whether a new account would be equal."""
        buckets = (self.requests, self.tokens)
        busy = self.in_flight or self.num_uncounted or self.limits.monthly_spend is not None
        return not busy and all(b is None or b.full_in(now) == 0 for b in buckets)


@dataclass(slots=True)
class AdmittedTurn:
    """One turn's place. Once `is_open` is set, the turn's close counts its use."""

    is_open: bool = False


class Used(msgspec.Struct, frozen=True, array_like=True):
    """What a closed turn counts: tokens towards its workspace's limit, and nano-dollars."""

    turn_id: str
    workspace: str
    tokens: int
    cost: int
    opened_at: datetime


def used_by(record: TurnRecord) -> Used:
    tokens = record.input_tokens + record.written_tokens + record.output_tokens
    return Used(record.id, record.workspace, tokens, record.cost or 0, record.opened_at)


class _Reservation(NamedTuple):
    workspace: str
    estimate: int
    tokens: int


class Admission:
    def __init__(self, monotonic: Callable[[], float], wall: Callable[[], datetime]) -> None:
        self._monotonic = monotonic
        self._wall = wall
        self._month = month_of(wall())
        self._in_flight = 0
        self._accounts: OrderedDict[str, _Account] = OrderedDict()
        self._reservations: dict[str, _Reservation] = {}

    @property
    def in_flight(self) -> int:
        return self._in_flight

    def admitted(
        self, turn_id: str, principal: Principal, estimate: int, backlog: int
    ) -> AbstractContextManager[AdmittedTurn]:
        """Hold one place for a turn while the block runs. `estimate` is in tokens.

        Entering raises Overloaded, RateLimited or SpendLimitReached, with nothing taken.
        """
        return _Place(self, turn_id, principal, estimate, backlog)

    def check_room(self, backlog: int) -> None:
        """Raise Overloaded if the gateway has no room for another turn."""
        if self._in_flight >= MAX_ADMITTED or backlog >= MAX_BACKLOG:
            raise Overloaded

    def take(
        self,
        turn_id: str,
        workspace: str,
        limits: Limits,
        estimate: int,
    ) -> None:
        """Take a turn's place until `leave`. `estimate` is in tokens.

        Raise RateLimited or SpendLimitReached, with nothing taken.
        """
        account = self._account(workspace, limits)
        reservation = self._reserve(account, workspace, max(1, estimate))
        self._reservations[turn_id] = reservation
        self._in_flight += 1
        account.in_flight += 1
        account.num_uncounted += 1

    def leave(self, turn_id: str, workspace: str, *, is_open: bool) -> None:
        """Give a place back. The close of a turn that is in the journal counts its use."""
        self._in_flight -= 1
        self._account(workspace).in_flight -= 1
        if not is_open:
            self.give_back(turn_id)

    def give_back(self, turn_id: str) -> None:
        """Return what a turn reserved that used nothing. A second call does nothing."""
        self._put_right(turn_id, 0)

    def count_used(self, record: TurnRecord) -> None:
        """Count the use and the cost of a closed turn, also of an earlier run's turn."""
        self.count(used_by(record))

    def count(self, used: Used) -> None:
        self._put_right(used.turn_id, used.tokens)
        if used.cost:
            account = self._this_months(self._account(used.workspace))
            if account.month == month_of(used.opened_at):
                account.spent += used.cost

    def learn_spend(self, month: datetime, spent: Mapping[str, int]) -> None:
        """Take in the ledger's costs of this month: all gateways', by workspace, in nano-dollars.

        The larger number counts. Ours has turns that are not in the ledger yet. The ledger's has
        turns of other gateways and of earlier runs. So no turn counts twice.
        """
        for workspace, amount in spent.items():
            account = self._this_months(self._account(workspace))
            if account.month == month:
                account.spent = max(account.spent, amount)

    def rates(self, principal: Principal) -> Standings:
        """How much of its limits the workspace has left; None for a limit that it does not have."""
        return self.standings(principal.workspace, principal.limits)

    def standings(self, workspace: str, limits: Limits) -> Standings:
        now = self._monotonic()
        account = self._account(workspace, limits)
        return Standings(_rate(account.requests, now), _rate(account.tokens, now))

    def _reserve(self, account: _Account, workspace: str, estimate: int) -> _Reservation:
        """Check everything, then take everything."""
        limits, now = account.limits, self._monotonic()
        reserved = 0
        if limits.tokens_per_minute is not None:
            expected = math.ceil(estimate * account.counted_share)
            reserved = min(max(1, expected), limits.tokens_per_minute)
        self._check(account, reserved, now)
        for bucket, amount in ((account.requests, 1), (account.tokens, reserved)):
            if bucket is not None:
                bucket.take(amount, now)
        return _Reservation(workspace, estimate, reserved)

    def _check(self, account: _Account, tokens: int, now: float) -> None:
        """Raise RateLimited or SpendLimitReached if another turn of so many tokens can't begin."""
        limits = account.limits
        most = limits.monthly_spend
        if most is not None and self._this_months(account).spent >= most:
            raise SpendLimitReached
        if limits.max_concurrency is not None and account.in_flight >= limits.max_concurrency:
            raise RateLimited("concurrent requests", limits.max_concurrency, 1)
        wanted = [
            ("requests per minute", account.requests, 1),
            ("tokens per minute", account.tokens, tokens),
        ]
        waits = [(b.wait(n, now), what, b.per_minute) for what, b, n in wanted if b is not None]
        seconds, what, limit = max(waits, default=(0.0, "", 0))
        if seconds > 0:
            raise RateLimited(what, limit, max(1, math.ceil(seconds)))

    def _put_right(self, turn_id: str, counted: int) -> None:
        """Replace a turn's reservation by its counted tokens. A second call does nothing."""
        if (reservation := self._reservations.pop(turn_id, None)) is None:
            return
        account = self._account(reservation.workspace)
        account.num_uncounted -= 1
        if account.tokens is not None:
            account.tokens.take(counted - reservation.tokens, self._monotonic())
        if counted:
            share = min(1.0, counted / reservation.estimate)
            account.counted_share += _LEARNING * (share - account.counted_share)

    def _account(self, workspace: str, limits: Limits | None = None) -> _Account:
        account = self._accounts.get(workspace)
        if account is None:
            self._make_room(self._monotonic())
            account = self._accounts[workspace] = _Account()
        self._accounts.move_to_end(workspace)
        if limits is not None and limits is not account.limits:
            account.take_over(limits, self._monotonic())
        return account

    def _this_months(self, account: _Account) -> _Account:
        """The account, whose cost is of this month. Nobody else may read or change the cost."""
        now = self._wall()
        if (now.year, now.month) != (self._month.year, self._month.month):
            self._month = month_of(now)
        account.turn_to(self._month)
        return account

    def _make_room(self, now: float) -> None:
        """Forget idle workspaces, longest unused first, while there are too many."""
        surplus = len(self._accounts) + 1 - MAX_ACCOUNTS
        if surplus > 0:
            idle = [name for name, account in self._accounts.items() if account.is_idle(now)]
            for name in idle[:surplus]:
                del self._accounts[name]


class _Place:
    """A turn's place in an `Admission`, which the block holds."""

    __slots__ = ("_admission", "_backlog", "_estimate", "_principal", "_turn", "_turn_id")

    def __init__(
        self, admission: Admission, turn_id: str, principal: Principal, estimate: int, backlog: int
    ) -> None:
        self._admission = admission
        self._turn_id = turn_id
        self._principal = principal
        self._estimate = estimate
        self._backlog = backlog
        self._turn = AdmittedTurn()

    def __enter__(self) -> AdmittedTurn:
        principal = self._principal
        self._admission.check_room(self._backlog)
        self._admission.take(self._turn_id, principal.workspace, principal.limits, self._estimate)
        return self._turn

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        workspace = self._principal.workspace
        self._admission.leave(self._turn_id, workspace, is_open=self._turn.is_open)


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


def _rate(bucket: TokenBucket | None, now: float) -> Standing | None:
    if bucket is None:
        return None
    return Standing(bucket.per_minute, bucket.remaining(now), bucket.full_in(now))
