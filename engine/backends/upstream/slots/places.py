"""Which slot a request gets, the content of each slot, and its scope.

The server would choose by likeness and recency, over all scopes. So each request names its slot.
"""

import asyncio
from dataclasses import dataclass

from engine.cache.digests import TOKEN_BYTES
from engine.text.template.boundaries import common_length


@dataclass(slots=True, eq=False)
class Slot:
    """One of the server's slots."""

    number: int
    # The scope whose content it has, with adapter and salt.
    scope: str = ""
    # The workspace in `scope`.
    owner: str = ""
    # The packed token ids that its content begins with. None: not known, so nothing is reused.
    content: bytes | None = None
    is_busy: bool = False
    # Its request has ended. It is given back once the server has let go of it.
    is_leaving: bool = False
    # Its content must be erased before anything else, because its entries have ended.
    is_condemned: bool = False
    # A request runs in it that is not ours, or that should have ended.
    is_away: bool = False
    # The server's number of our last request in it. A request of another number was not ours.
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
        """Take the slot that has most of this scope's prompt.

        If none has any of it, take an empty slot, else the least recently used one. If a slot whose
        answer has ended has more of the prompt than the free slots, this waits for it. The server
        lets go of it after the current batch, which a request in any other slot would wait for too.
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
        """Take a free slot whose content must be erased. None if there is none."""
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
        """Keep a taken slot from all requests until it is given back."""
        slot.is_away = True
        slot.is_leaving = False
        slot.content = None
        self._hand_out()

    def condemn(self, owner: str | None, prefix: bytes) -> None:
        """Condemn a workspace's content that begins with these packed tokens.

        It is not served any more. With None as `owner` this holds for all workspaces.
        """
        for slot in self.slots:
            is_owned = owner in (None, slot.owner)
            content = slot.content
            if is_owned and (content is None or content.startswith(prefix)):
                slot.is_condemned = True
        self._hand_out()

    def num_condemned(self, owner: str | None) -> int:
        """How many slots may have a workspace's condemned content; None: anybody's.

        The owner of a slot is not known before its first request.
        """
        owned = (slot for slot in self.slots if owner is None or slot.owner in ("", owner))
        return sum(slot.is_condemned for slot in owned)

    def _hand_out(self) -> None:
        """Give free slots to the waiting requests, in order of arrival."""
        for wish in list(self._waiting):
            if all(slot.is_busy for slot in self.slots):
                return
            slot = self._choice(wish)
            if slot is not None and not slot.is_busy and not wish.slot.cancelled():
                self._waiting.remove(wish)
                self._take(slot)
                wish.slot.set_result(slot)

    def _choice(self, wish: _Wish) -> Slot | None:
        """The slot that a request gets now, or waits for. None: all slots are in use."""
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
