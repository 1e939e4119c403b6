"""The refused requests of the model APIs: the newest of each workspace, and why."""

import re
from collections import OrderedDict, deque
from heapq import merge
from itertools import islice

from gateway.base.errors import GatewayError, RateLimited, SpendLimitReached
from gateway.structs.usage import Limited, Refusal

_CAPITAL = re.compile(r"(?<!^)(?=[A-Z])")
MAX_OF_WORKSPACE = 200
MAX_WORKSPACES = 500
MAX_LIMITED = 5000
MESSAGE_CHARACTERS = 300
PATH_CHARACTERS = 128


def limit_of(failure: GatewayError) -> str | None:
    """The limit of the workspace that a request was refused for."""
    match failure:
        case RateLimited(what=str(what)):
            return what
        case SpendLimitReached():
            return "dollars per month"
    return None


def reason_of(failure: GatewayError) -> str:
    """Why a request was refused, in few words: the limit of its workspace, or the error's name."""
    limit = limit_of(failure)
    if limit is not None:
        return limit
    return _CAPITAL.sub(" ", type(failure).__name__).lower()


class Refusals:
    """The newest refusals, in memory: at most MAX_OF_WORKSPACE for each of MAX_WORKSPACES
    workspaces. Refusals by a limit are also counted."""

    def __init__(self) -> None:
        self._newest: OrderedDict[str | None, deque[Refusal]] = OrderedDict()
        self._limited: OrderedDict[tuple[str, str, str], tuple[int, int]] = OrderedDict()

    def keep(self, refusal: Refusal) -> None:
        of_workspace = self._newest.setdefault(refusal.workspace, deque(maxlen=MAX_OF_WORKSPACE))
        of_workspace.append(refusal)
        self._newest.move_to_end(refusal.workspace)
        while len(self._newest) > MAX_WORKSPACES:
            self._newest.popitem(last=False)
        if refusal.workspace and refusal.key and refusal.limit:
            limit_key = refusal.workspace, refusal.key, refusal.limit
            count, _ = self._limited.get(limit_key, (0, 0))
            self._limited[limit_key] = count + 1, refusal.at_ms
            self._limited.move_to_end(limit_key)
            while len(self._limited) > MAX_LIMITED:
                self._limited.popitem(last=False)

    def purge(self, workspace: str) -> None:
        """Forget a workspace's refusals, whose messages may quote requests."""
        self._newest.pop(workspace, None)

    def limited(self, workspace: str | None) -> list[Limited]:
        """How often limits refused requests, the largest counts first. `workspace` None selects
        all."""
        counts = [
            Limited(workspace=owner, key=key, limit=limit, requests=count, last_ms=last_ms)
            for (owner, key, limit), (count, last_ms) in self._limited.items()
            if workspace in (None, owner)
        ]
        return sorted(counts, key=lambda row: (-row.requests, row.key, row.limit))

    def newest(self, workspace: str | None, request_id: str | None, limit: int) -> list[Refusal]:
        """The newest refusals, the newest first. `workspace` None selects all, also refusals
        without a workspace."""
        parts = self._newest.values() if workspace is None else [self._newest.get(workspace, ())]
        newest_parts = (
            (refusal for refusal in reversed(part) if request_id in (None, refusal.request_id))
            for part in parts
        )
        # Each part is in the order of time, so no more is sorted than is answered.
        return list(islice(merge(*newest_parts, key=lambda refusal: -refusal.at_ms), limit))
