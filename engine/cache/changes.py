"""What becomes of the names that the pools hold, as events, in the order in which it happens. Pure.

All pools of one engine write into one list. A name may leave one pool and come into another within
a step. Then only the order tells a follower whether the engine holds it in the end.
"""

from collections.abc import Iterable, Mapping

from engine.protocol import ChainGone, ChainHeld, HeldName, Tier


class Changes:
    """The events have no number yet."""

    def __init__(self) -> None:
        self._events: list[ChainGone | ChainHeld] = []

    def gone(self, names: Iterable[str]) -> None:
        """Their block has lost its content. Names that go one after the other are told together."""
        found = list(names)
        if not found:
            return
        last = self._events[-1] if self._events else None
        if isinstance(last, ChainGone):
            last.names.extend(found)
        else:
            self._events.append(ChainGone(seq=0, names=found, reason="evicted"))

    def moved(self, tier: Tier, names: Mapping[str, int]) -> None:
        """The names of one block, with the tokens of their prefixes, are in this tier now."""
        if names:
            held = [HeldName(name, tokens) for name, tokens in names.items()]
            self._events.append(ChainHeld(seq=0, names=held, tier=tier))

    def take(self) -> list[ChainGone | ChainHeld]:
        """The events since the last call."""
        events, self._events = self._events, []
        return events
