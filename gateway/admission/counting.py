"""The limits of `count_tokens` for each workspace: requests and bytes a minute, calls at one time.

A count makes no turn, so no limit of turns bounds it. Pure but for the clock that is handed in.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.admission.bucket import TokenBucket
from gateway.base.bounds import Tuning
from gateway.base.errors import RateLimited

_MAX_WORKSPACES = 10_000


@dataclass(slots=True)
class _Account:
    requests: TokenBucket
    num_bytes: TokenBucket
    num_running: int = 0

    def is_idle(self, now: float) -> bool:
        full = self.requests.full_in(now) == 0 and self.num_bytes.full_in(now) == 0
        return full and not self.num_running


class Counting:
    def __init__(self, bounds: Tuning, monotonic: Callable[[], float]) -> None:
        self._bounds = bounds
        self._monotonic = monotonic
        self._accounts: OrderedDict[str, _Account] = OrderedDict()

    @contextmanager
    def admitted(self, workspace: str, num_bytes: int) -> Iterator[None]:
        """Hold a place for one call with a body of `num_bytes`, or raise RateLimited.

        A refused call takes nothing. An admitted call gives no requests and bytes back, because it
        costs as much when nobody waits for it any more.
        """
        self.take(workspace, num_bytes)
        try:
            yield
        finally:
            self.leave(workspace)

    def take(self, workspace: str, num_bytes: int) -> None:
        """Take a place until `leave`. Raise RateLimited, with nothing taken."""
        account, now = self._account(workspace), self._monotonic()
        most = self._bounds.count_concurrency
        if account.num_running >= most:
            raise RateLimited("concurrent calls of count_tokens", most, 1)
        wanted = [
            (account.requests, 1, "calls of count_tokens per minute"),
            (account.num_bytes, num_bytes, "bytes in count_tokens per minute"),
        ]
        for bucket, amount, what in wanted:
            if (seconds := bucket.wait(amount, now)) > 0:
                raise RateLimited(what, bucket.per_minute, math.ceil(seconds))
        for bucket, amount, _ in wanted:
            bucket.take(amount, now)
        account.num_running += 1

    def leave(self, workspace: str) -> None:
        self._account(workspace).num_running -= 1

    def _account(self, workspace: str) -> _Account:
        account = self._accounts.get(workspace)
        if account is None:
            now = self._monotonic()
            self._make_room(now)
            account = self._accounts[workspace] = _Account(
                TokenBucket.full(self._bounds.count_requests_per_minute, now),
                TokenBucket.full(self._bounds.count_bytes_per_minute, now),
            )
        self._accounts.move_to_end(workspace)
        return account

    def _make_room(self, now: float) -> None:
        """Forget idle workspaces, those unused for longest first, while there are too many."""
        if len(self._accounts) < _MAX_WORKSPACES:
            return
        for name in [name for name, account in self._accounts.items() if account.is_idle(now)]:
            del self._accounts[name]
