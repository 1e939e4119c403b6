"""What the workers of a gateway tell each other of engines, through their parent.

Each worker's knowledge for routing is then that of all: the turns that run at each engine, the
prefixes that were sent there, which turns failed there, and for an engine without events what its
answers told. The parent counts the same, for the queue that all workers share.
"""

from dataclasses import dataclass, field

import msgspec

from engine.protocol import Receipt


class Assigned(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """A turn was sent to an engine.

    Of its `tokens` the engine has to compute `to_prefill`. `expected` are the names that the engine
    was not known to hold.
    """

    engine: str
    turn: str
    workspace: str
    is_batch: bool
    tokens: int
    to_prefill: int
    expected: list[str]


class Answered(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """A turn's answer began. `receipt` is told of engines without events, with the names in it."""

    engine: str
    turn: str
    computed: int
    epoch: str = ""
    receipt: Receipt | None = None
    names: list[str] = []


class Ended(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """A turn is over at an engine.

    `is_returned`: the engine computed nothing of it. It holds nothing of `disappointed`.
    `is_success`: it was completed, or refused because of its own content.
    """

    engine: str
    turn: str
    is_returned: bool = False
    disappointed: list[str] = []
    is_success: bool = False


class Broke(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """An engine was gone or silent for a turn."""

    engine: str
    turn: str


News = Assigned | Answered | Ended | Broke


@dataclass(slots=True)
class RunningTurns:
    """The turns of one worker that are at engines, from what it told."""

    _turns: dict[str, list[Assigned | Answered]] = field(default_factory=dict)

    def take(self, news: News) -> None:
        match news:
            case Assigned():
                self._turns[news.turn] = [news]
            case Answered():
                self._turns.setdefault(news.turn, []).append(news)
            case Ended():
                self._turns.pop(news.turn, None)

    def told(self) -> list[Assigned | Answered]:
        """What has to be told of them to a worker that knows nothing."""
        return [one for turn in self._turns.values() for one in turn]

    def ended(self) -> list[Ended]:
        """The worker is gone: the end of all of them."""
        return [Ended(told[0].engine, turn) for turn, told in self._turns.items()]
