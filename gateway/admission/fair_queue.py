"""A bounded queue that is fair between workspaces. Pure: no clock, no I/O.

Turns of one workspace are served in the order of their arrival. Workspaces are served by start-time
fair queueing (Goyal, Vin and Cheng 1996) over tokens: the lowest *start tag* is next. A workspace's
start tag is the tokens that it was served so far, and at least the tag that was served last. A turn
is charged its estimate when it is taken. What it reads from a cache is given back. Otherwise a
workspace that caches well would wait for one that does not.

The queue is bounded in turns and in tokens, in total and for each workspace. When it is full in
total, a new turn may replace the newest turns of the workspace that has the most, if its own
workspace has less.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Generic, Literal, TypeVar

MAX_TURNS = 1024
MAX_TOKENS = 1 << 24
"""At 4 bytes a token this is 64 MiB of prompts."""
_MAX_TAGS = 10_000

FullReason = Literal["queue_full", "workspace_full"]
ItemT = TypeVar("ItemT")


class QueueFull(Exception):
    def __init__(self, reason: FullReason) -> None:
        super().__init__(reason)
        self.reason: FullReason = reason


@dataclass(slots=True, eq=False)
class Waiting(Generic[ItemT]):
    """One turn in the queue."""

    workspace: str
    # Turns of one kind can go to the same engines.
    kind: str | None
    # Its estimate.
    tokens: int
    item: ItemT
    # The tokens that its workspace's tag was raised by for it. A turn that an engine refused is
    # not charged twice.
    charged: int = 0


@dataclass(slots=True)
class _Lane(Generic[ItemT]):
    """One workspace's waiting turns."""

    # The start tag of the next turn.
    start: int
    # The tag that was served last when the lane began. Tokens that are given back never lower the
    # start tag below it.
    least: int
    # The sum of the turns' estimates.
    tokens: int = 0
    # The turns in the order of their arrival, by identity.
    turns: dict[int, Waiting[ItemT]] = field(default_factory=dict)

    def heads(self) -> Iterator[Waiting[ItemT]]:
        """The first turn of each kind."""
        seen: set[str | None] = set()
        for waiting in self.turns.values():
            if waiting.kind not in seen:
                seen.add(waiting.kind)
                yield waiting


class FairQueue(Generic[ItemT]):
    """The queue. One workspace may have half of `turns` and of `tokens`. Its only turn may have
    more tokens."""

    def __init__(self, turns: int = MAX_TURNS, tokens: int = MAX_TOKENS) -> None:
        self._most_turns = turns
        self._most_tokens = tokens
        self._lanes: dict[str, _Lane[ItemT]] = {}
        # Start tags of workspaces without a waiting turn, if they are above the tag served last.
        self._tags: dict[str, int] = {}
        self._served = 0
        self._num_turns = 0
        self._num_tokens = 0

    def __len__(self) -> int:
        return self._num_turns

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    def push(self, waiting: Waiting[ItemT], *, is_first: bool = False) -> list[Waiting[ItemT]]:
        """Put a turn behind its workspace's turns, or with `is_first` before them. Return the turns
        that made way. Raise QueueFull, with nothing changed."""
        lane = self._lanes.get(waiting.workspace)
        if lane is not None and (
            len(lane.turns) >= self._most_turns // 2
            or lane.tokens + waiting.tokens > self._most_tokens // 2
        ):
            raise QueueFull("workspace_full")
        victims = self._victims(waiting)
        for victim in victims:
            self.remove(victim)
        lane = self._lanes.get(waiting.workspace)
        if lane is None:
            tag = self._tags.pop(waiting.workspace, 0)
            lane = _Lane(max(tag, self._served), self._served)
            self._lanes[waiting.workspace] = lane
        # A turn that comes back was not served. It is charged again when it goes.
        self.give_back(waiting.workspace, waiting.charged)
        waiting.charged = 0
        before = lane.turns if is_first else {}
        if is_first:
            lane.turns = {}
        lane.turns[id(waiting)] = waiting
        lane.turns.update(before)
        lane.tokens += waiting.tokens
        self._num_turns += 1
        self._num_tokens += waiting.tokens
        return victims

    def pop(
        self,
        can_go: Callable[[str | None], bool],
        can_go_early: Callable[[Waiting[ItemT]], bool] | None = None,
    ) -> Waiting[ItemT] | None:
        """Take the next turn whose kind can go, or that can go early; None if there is none."""
        answers: dict[str | None, bool] = {}
        for lane in sorted(self._lanes.values(), key=lambda lane: lane.start):
            for waiting in lane.heads():
                if waiting.kind not in answers:
                    answers[waiting.kind] = can_go(waiting.kind)
                if answers[waiting.kind] or (can_go_early and can_go_early(waiting)):
                    self._served = max(self._served, lane.start)
                    lane.start += waiting.tokens
                    waiting.charged = waiting.tokens
                    self.remove(waiting)
                    return waiting
        return None

    def give_back(self, workspace: str, tokens: int) -> None:
        """Lower the start tag of a workspace that was charged so many tokens too much."""
        lane = self._lanes.get(workspace)
        if lane is not None:
            lane.start = max(lane.start - tokens, lane.least)
        elif workspace in self._tags:
            self._tags[workspace] -= tokens
            if self._tags[workspace] <= self._served:
                del self._tags[workspace]

    def remove(self, waiting: Waiting[ItemT]) -> bool:
        """Take a turn out. Return whether it was in the queue."""
        lane = self._lanes.get(waiting.workspace)
        if lane is None or lane.turns.pop(id(waiting), None) is None:
            return False
        lane.tokens -= waiting.tokens
        self._num_turns -= 1
        self._num_tokens -= waiting.tokens
        if lane.turns:
            return True
        del self._lanes[waiting.workspace]
        if not self._lanes:
            self._tags.clear()
            self._served = 0
        elif lane.start > self._served:
            self._tags[waiting.workspace] = lane.start
        if len(self._tags) > _MAX_TAGS:
            self._tags = {name: tag for name, tag in self._tags.items() if tag > self._served}
            while len(self._tags) > _MAX_TAGS:
                del self._tags[min(self._tags, key=self._tags.__getitem__)]
        return True

    def _victims(self, waiting: Waiting[ItemT]) -> list[Waiting[ItemT]]:
        """The newest turns of the workspace that has the most, until there is room. Raise QueueFull
        if the new turn's workspace would have as many."""
        turns = self._num_turns + 1 - self._most_turns
        tokens = self._num_tokens + waiting.tokens - self._most_tokens
        if turns <= 0 and tokens <= 0:
            return []
        new_lane = self._lanes.get(waiting.workspace)
        num_turns = len(new_lane.turns) if new_lane else 0
        num_tokens = new_lane.tokens if new_lane else 0
        share = self._share(num_turns + 1, num_tokens + waiting.tokens)
        remaining = {name: [len(lane.turns), lane.tokens] for name, lane in self._lanes.items()}
        newest = {name: reversed(lane.turns.values()) for name, lane in self._lanes.items()}
        victims: list[Waiting[ItemT]] = []
        while turns > 0 or tokens > 0:
            name = max(remaining, key=lambda name: self._share(*remaining[name]), default=None)
            if name is None or name == waiting.workspace or self._share(*remaining[name]) <= share:
                raise QueueFull("queue_full")
            victim = next(newest[name])
            victims.append(victim)
            remaining[name][0] -= 1
            remaining[name][1] -= victim.tokens
            turns -= 1
            tokens -= victim.tokens
        return victims

    def _share(self, turns: int, tokens: int) -> float:
        """A workspace's share of the queue: of its turns or of its tokens, whichever is larger."""
        return max(turns / self._most_turns, tokens / self._most_tokens)
