"""How many orders a server has at a time, and in which of its slots each one runs. Pure.

Slots are llama.cpp's: each keeps what was computed in it last. An order goes into the free slot of
its own scope that has most of its prompt; else into the slot that was used least lately, and then
nothing that is in it may be reused, since another scope left it.
"""

from dataclasses import dataclass, field

from engine.cache.digests import TOKEN_BYTES


@dataclass(slots=True)
class Slot:
    """`prompt` is the last one's token ids, packed."""

    number: int
    scope: str = ""
    prompt: bytes = b""
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

    def take(self, scope: str, prompt: bytes) -> Place | None:
        """A place for this prompt (`pack`); None while all are busy. To be given back."""
        free = [slot for slot in self._slots if not slot.is_busy]
        if not free:
            return None
        own = [slot for slot in free if slot.scope == scope]
        best = max(own, key=lambda slot: common_length(slot.prompt, prompt), default=None)
        unused = min(free, key=lambda slot: slot.last_use)
        is_poor = best is not None and not common_length(best.prompt, prompt)
        if best is None or (is_poor and not unused.scope):
            best = unused
        may_reuse = best.scope == scope
        self._uses += 1
        best.scope, best.prompt, best.is_busy, best.last_use = scope, prompt, True, self._uses
        return Place(best.number, may_reuse)

    def give_back(self, place: Place) -> None:
        self._slots[place.slot].is_busy = False


def common_length(one: bytes, other: bytes) -> int:
    """How many tokens two packed prompts begin with together.

    Bisection: each token is compared once or twice, outside of the interpreter. This runs on the
    engine's event loop for every free slot of a scope.
    """
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        start, end = low * TOKEN_BYTES, middle * TOKEN_BYTES
        if one[start:end] == other[start:end]:
            low = middle
        else:
            high = middle - 1
    return low
