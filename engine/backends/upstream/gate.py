"""How many orders a server has at a time, and in which of its slots each one runs. Pure.

Slots are llama.cpp's: each keeps what was computed in it last. An order goes into the free slot of
its own scope that has most of its prompt; else into the slot that was used least lately, and then
nothing that is in it may be reused, since another scope left it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.cache.ids import TokenId


@dataclass(slots=True)
class Slot:
    number: int
    scope: str = ""
    tokens: Sequence[TokenId] = ()
    is_busy: bool = False
    last_use: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    slot: int
    may_reuse: bool


@dataclass(slots=True)
class Slots:
    num_slots: int
    _slots: list[Slot] = field(default_factory=list)
    _uses: int = 0

    def __post_init__(self) -> None:
        self._slots = [Slot(number) for number in range(self.num_slots)]

    @property
    def num_busy(self) -> int:
        return sum(slot.is_busy for slot in self._slots)

    def take(self, scope: str, tokens: Sequence[TokenId]) -> Place | None:
        """A place for this prompt; None while all are busy. To be given back."""
        free = [slot for slot in self._slots if not slot.is_busy]
        if not free:
            return None
        own = [slot for slot in free if slot.scope == scope]
        best = max(own, key=lambda slot: common_length(slot.tokens, tokens), default=None)
        unused = min(free, key=lambda slot: slot.last_use)
        is_poor = best is not None and not common_length(best.tokens, tokens)
        if best is None or (is_poor and not unused.scope):
            best = unused
        may_reuse = best.scope == scope
        self._uses += 1
        best.scope, best.tokens, best.is_busy, best.last_use = scope, tokens, True, self._uses
        return Place(best.number, may_reuse)

    def give_back(self, place: Place) -> None:
        self._slots[place.slot].is_busy = False

    def forget(self) -> None:
        """The server was started anew."""
        for slot in self._slots:
            slot.scope, slot.tokens = "", ()


def common_length(one: Sequence[TokenId], other: Sequence[TokenId]) -> int:
    """How many tokens two prompts begin with together."""
    length = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        length += 1
    return length
