"""Which slot a request gets, what each slot has, and whose that is.

The server's own choice goes by likeness and recency, over all scopes. So no request is left to it.
"""

import asyncio
from dataclasses import dataclass

from engine.cache.digests import TOKEN_BYTES
from engine.text.template.boundaries import common_length


@dataclass(slots=True, eq=False)
class Slot:
    """One of the server's slots. `scope` is whose content it has."""

    number: int
    scope: str = ""
    # The workspace's part of that.
    owner: str = ""
    # The packed token ids that its content begins with. None: not known, so nothing is reused.
    content: bytes | None = None
    is_busy: bool = False
    # Nothing more is wanted of it: it is given back once the server lets go of it.
    is_leaving: bool = False
    # Its content is to be erased before anything else: what it stood for is over.
    is_condemned: bool = False
    # Something runs in it that is not ours, or goes on when it should have ended.
    is_away: bool = False
    # The server's number of its last request. Another one was not ours.
    last_task: int | None = None
    last_use: int = 0

    def common(self, scope: str, prompt: bytes) -> int:
        """How many tokens of a scope's prompt (packed) its content is known to begin with."""
        if self.scope != scope or not self.content or self.is_condemned:
            return 0
        return common_length(self.content, prompt, TOKEN_BYTES)


@dataclass(frozen=True, slots=True, eq=False)
class _Wish:
    """A request that waits for a slot."""

    scope: str
    # Packed token ids.
    prompt: bytes
    slot: asyncio.Future[Slot]


class SlotBook:
    """All slots. A slot that is taken is its taker's alone until it is given back."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot(number) for number in range(num_slots)]
        self._waiting: list[_Wish] = []
        self._uses = 0

    @property
    def num_taken(self) -> int:
        return sum(slot.is_busy and not slot.is_away for slot in self.slots)

    @property
    def num_away(self) -> int:
        return sum(slot.is_away for slot in self.slots)

    async def take(self, scope: str, prompt: bytes) -> Slot:
        """The slot that has most of this scope's prompt, else an empty one, else the one that was
        used least lately.

        One whose answer has ended is waited for, if it has more of the prompt than those that are
        free. The server lets go of it behind the batch in hand, and a request in any other slot
        would wait for that too.
        """
        wish = _Wish(scope, prompt, asyncio.get_running_loop().create_future())
        self._waiting.append(wish)
        self._hand_out()
        try:
            return await wish.slot
        except asyncio.CancelledError:
            if wish in self._waiting:
                self._waiting.remove(wish)
            else:
                self.give(wish.slot.result())
            raise

    def take_condemned(self) -> Slot | None:
        """A free slot whose content is over."""
        for slot in self.slots:
            if slot.is_condemned and not slot.is_busy:
                self._take(slot)
                return slot
        return None

    def give(self, slot: Slot) -> None:
        slot.is_busy = False
        slot.is_leaving = False
        slot.is_away = False
        self._hand_out()

    def put_away(self, slot: Slot) -> None:
        """Nobody gets this slot, which is taken, until it is given back."""
        slot.is_away = True
        slot.is_leaving = False
        slot.content = None
        self._hand_out()

    def condemn(self, owner: str | None, prefix: bytes) -> None:
        """Nothing of a workspace that begins with these tokens (packed) may be served any more.
        None: of any."""
        for slot in self.slots:
            is_its = owner in (None, slot.owner)
            content = slot.content
            if is_its and (content is None or content.startswith(prefix)):
                slot.is_condemned = True
        self._hand_out()

    def _hand_out(self) -> None:
        """Give free slots to who waits for them, in the order in which they came."""
        for wish in list(self._waiting):
            if all(slot.is_busy for slot in self.slots):
                return
            slot = self._choice(wish)
            if slot is not None and not slot.is_busy and not wish.slot.cancelled():
                self._waiting.remove(wish)
                self._take(slot)
                wish.slot.set_result(slot)

    def _choice(self, wish: _Wish) -> Slot | None:
        """The slot that a request gets now, or waits for. None: all are used."""
        return min(
            (slot for slot in self.slots if slot.is_leaving or not slot.is_busy),
            key=lambda slot: (
                -slot.common(wish.scope, wish.prompt),
                slot.is_busy,
                bool(slot.content) and slot.scope != wish.scope,
                slot.last_use,
            ),
            default=None,
        )

    def _take(self, slot: Slot) -> None:
        self._uses += 1
        slot.last_use = self._uses
        slot.is_busy = True
