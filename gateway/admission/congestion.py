"""How many unanswered turns a workspace may have at engines, where its clients keep leaving early.

A turn whose client leaves before the first token has cost an engine its prefill, and nobody has an
answer of it. A workspace without such turns has no bound here. A workspace with them has a
*window*, which follows TCP's congestion control (RFC 5681: additive increase, multiplicative
decrease):

- a turn that its client left before the first token halves the window, down to its least,
- a turn that reached its first token widens it by one,
- each IDLE_SECONDS in which the workspace has no turn at an engine double it,
- from MOST on there is no window.

So at most half of the engines work for a workspace whose turns are all left early, and a workspace
where one turn of a hundred is left keeps about two hundred. A turn that was left counts until its
engine has been told to end it. A workspace that is alone is not bound by its window: the window
binds while another workspace has had a turn within NEIGHBOUR_SECONDS.

Pure, on a clock that is handed in. Each gateway has its own windows.
"""

from collections.abc import Callable
from dataclasses import dataclass

IDLE_SECONDS = 5.0
NEIGHBOUR_SECONDS = 60.0
"""How long after its last turn began a workspace counts as a neighbour."""
MOST = 2000
"""As many as a gateway has at engines in all (`accounts.py`)."""
_MAX_WORKSPACES = 10_000


@dataclass(slots=True)
class _Account:
    """One workspace: its unanswered turns, its window, and since when it has no such turn."""

    num: int = 0
    window: int | None = None
    idle_since: float = 0.0

    def window_at(self, now: float) -> int | None:
        if self.window is None or self.num:
            return self.window
        doublings = int(max(now - self.idle_since, 0.0) / IDLE_SECONDS)
        widened = self.window << min(doublings, MOST.bit_length())
        return widened if widened < MOST else None


class CongestionWindows:
    def __init__(
        self,
        monotonic: Callable[[], float],
        on_room: Callable[[], None] = lambda: None,
        least: Callable[[], int] = lambda: 1,
    ) -> None:
        """`on_room` is called when a workspace with a window may have another turn at engines.

        `least` gives the least size of a window, in turns.
        """
        self._monotonic = monotonic
        self._on_room = on_room
        self._least = least
        self._accounts: dict[str, _Account] = {}
        # The last two workspaces that had turns, and when: one of them is not the workspace asked.
        self._last: dict[str, float] = {}

    @property
    def num_bounded(self) -> int:
        """How many workspaces have a window."""
        now = self._monotonic()
        return sum(one.window_at(now) is not None for one in self._accounts.values())

    def is_open(self, workspace: str) -> bool:
        """Whether one more turn of the workspace may go to an engine."""
        account = self._accounts.get(workspace)
        if account is None or account.window is None:
            return True
        now = self._monotonic()
        window = account.window_at(now)
        if window is None or account.num < window:
            return True
        others = (at for name, at in self._last.items() if name != workspace)
        return all(now - at > NEIGHBOUR_SECONDS for at in others)

    def enter(self, workspace: str) -> None:
        """Count a turn that goes to an engine now, also beyond the window.

        It counts until `answered` or `take_out`, of which the caller calls one, once.
        """
        now = self._monotonic()
        self._last.pop(workspace, None)
        self._last[workspace] = now
        if len(self._last) > 2:
            del self._last[next(iter(self._last))]
        account = self._accounts.get(workspace)
        if account is None:
            if len(self._accounts) >= _MAX_WORKSPACES:
                self._accounts = {
                    name: one
                    for name, one in self._accounts.items()
                    if one.num or one.window_at(now) is not None
                }
            account = self._accounts[workspace] = _Account()
        elif not account.num:
            account.window = account.window_at(now)
        account.num += 1

    def answered(self, workspace: str) -> None:
        """A turn reached its first token: widen the window, and take the turn out."""
        account = self._accounts[workspace]
        if account.window is not None:
            account.window = account.window + 1 if account.window + 1 < MOST else None
        self.take_out(workspace)

    def halve(self, workspace: str) -> None:
        """Halve the window, or what is at engines where that is less."""
        account = self._accounts[workspace]
        used = account.num if account.window is None else min(account.window, account.num)
        account.window = max(used // 2, self._least(), 1)

    def take_out(self, workspace: str) -> None:
        account = self._accounts[workspace]
        account.num -= 1
        account.idle_since = self._monotonic()
        if account.window is not None:
            self._on_room()
        elif not account.num:
            del self._accounts[workspace]
