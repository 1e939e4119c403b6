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


class SlotBook:
    """All slots. A slot that is taken is its taker's alone until it is given back."""

    def __init__(self, num_slots: int) -> None:
        self.slots = [Slot(number) for number in range(num_slots)]
        self._free = asyncio.Semaphore(num_slots)
        self._uses = 0

    @property
    def num_taken(self) -> int:
        return sum(slot.is_busy and not slot.is_away for slot in self.slots)

    @property
    def num_away(self) -> int:
        return sum(slot.is_away for slot in self.slots)

    async def take(self, scope: str, prompt: bytes) -> Slot:
        """The free slot that has most of this scope's prompt, else an empty one, else the one that
        was used least lately."""
        await self._free.acquire()
        free = [slot for slot in self.slots if not slot.is_busy]
        slot = min(
            free,
            key=lambda slot: (
                -slot.common(scope, prompt),
                bool(slot.content) and slot.scope != scope,
                slot.last_use,
            ),
        )
        self._take(slot)
        return slot

    async def take_condemned(self) -> Slot | None:
        """A free slot whose content is over. None if there is none once it is this one's turn:
        others may have waited for a slot, and are served first."""
        await self._free.acquire()
        condemned = (slot for slot in self.slots if slot.is_condemned and not slot.is_busy)
        slot = next(condemned, None)
        if slot is None:
            self._free.release()
        else:
            self._take(slot)
        return slot

    def give(self, slot: Slot) -> None:
        slot.is_busy = False
        slot.is_away = False
        self._free.release()

    def condemn(self, owner: str | None, prefix: bytes) -> None:
        """Nothing of a workspace that begins with these tokens (packed) may be served any more.
        None: of any."""
        for slot in self.slots:
            is_its = owner in (None, slot.owner)
            content = slot.content
            if is_its and (content is None or content.startswith(prefix)):
                slot.is_condemned = True

    def _take(self, slot: Slot) -> None:
        self._uses += 1
        slot.last_use = self._uses
        slot.is_busy = True
