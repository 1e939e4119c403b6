"""The newest error answers of this process, so that the request id of an error leads somewhere.

A request that is refused before its turn is opened is in no ledger. What is kept here is bounded,
and each workspace has its own part: one that is refused all day hides nobody else's. It is lost
with the process, and other gateways know nothing of it.
"""

from collections import OrderedDict, deque
from heapq import merge
from itertools import islice

from gateway.admin.structs.usage import Refusal

MAX_OF_WORKSPACE = 200
MAX_WORKSPACES = 500
MESSAGE_CHARACTERS = 300
PATH_CHARACTERS = 128


class Refusals:
    """At most MAX_OF_WORKSPACE of each of MAX_WORKSPACES workspaces, in memory."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str | None, deque[Refusal]] = OrderedDict()

    def keep(self, refusal: Refusal) -> None:
        own = self._kept.setdefault(refusal.workspace, deque(maxlen=MAX_OF_WORKSPACE))
        own.append(refusal)
        self._kept.move_to_end(refusal.workspace)
        while len(self._kept) > MAX_WORKSPACES:
            self._kept.popitem(last=False)

    def newest(self, workspace: str | None, request_id: str | None, limit: int) -> list[Refusal]:
        """The newest first. `workspace` None is all, also those without one."""
        parts = self._kept.values() if workspace is None else [self._kept.get(workspace, ())]
        wanted = (
            (one for one in reversed(part) if request_id in (None, one.request_id))
            for part in parts
        )
        # Each part is in the order of time, so no more is sorted than is answered.
        return list(islice(merge(*wanted, key=lambda refusal: -refusal.at_ms), limit))
