"""How many bytes of request bodies may be read and held at one time. Pure.

A workspace may hold at most as many bytes as are left for all (dynamic thresholds, Choudhury and
Hahne 1998). One workspace alone gets half. If n workspaces want all that they can get, each gets
1 / (n + 1), and 1 / (n + 1) stays free for the next workspace.
"""

from gateway.base.errors import Overloaded, RateLimited

_RETRY_SECONDS = 2


class BodyBytes:
    def __init__(self, most: int) -> None:
        self._most = most
        self._held: dict[str, int] = {}
        self._total = 0

    @property
    def total(self) -> int:
        return self._total

    def take(self, workspace: str, num_bytes: int) -> None:
        """Hold the bytes, or raise with nothing taken.

        Overloaded: all bytes are held. RateLimited: the workspace's part is held.
        """
        left = self._most - self._total
        held = self._held.get(workspace, 0)
        if num_bytes > left:
            raise Overloaded("too many bytes of requests are held", _RETRY_SECONDS)
        if held and held + num_bytes > left:
            raise RateLimited("bytes of requests held at one time", left, _RETRY_SECONDS)
        self._held[workspace] = held + num_bytes
        self._total += num_bytes

    def give_back(self, workspace: str, num_bytes: int) -> None:
        self._total -= num_bytes
        self._held[workspace] -= num_bytes
        if not self._held[workspace]:
            del self._held[workspace]
