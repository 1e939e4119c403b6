"""What a request asks for and the model does not do: told to the client, never an error.

A field that only asks for better (display, effort, strictness, thinking) never fails a request; the
reader of a dialect notes it here, with its path. A field that would change the answer's meaning is
refused, or a placeholder stands for it in the prompt (`prompt/media.py`).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from engine.protocol import Capability, UnheldTool

CANNOT_THINK = "this model does not think"
STRICT_REASON = "this model writes calls freely: one may differ from the tool's schema"
MAX_TOLD = 64
"""The most fields that one answer names. The others are counted in the last item."""
_MAX_PATH = 256


class Ignored(msgspec.Struct, frozen=True):
    """One field that was not done, by its path in the request, and why."""

    path: str
    reason: str


class Wish(msgspec.Struct, frozen=True):
    """A field that engines with `capability` carry out and others ignore. An engine with it may
    still report that it can't for this `tool`."""

    ignored: Ignored
    capability: Capability
    tool: str | None = None


class Notes(msgspec.Struct, frozen=True):
    """What one request asks for beyond what must be done.

    `ignored` is done by no engine; each of `wishes` depends on the engine. `num_more` were left out
    of the two lists.
    """

    ignored: tuple[Ignored, ...] = ()
    wishes: tuple[Wish, ...] = ()
    num_more: int = 0

    def told(
        self, capabilities: Collection[Capability], unheld: Iterable[UnheldTool] = ()
    ) -> list[Ignored]:
        """The fields that an engine with these capabilities did not do.

        `unheld` are the tools for which it says that it did not.
        """
        told, reasons = [*self.ignored], {one.tool: one.reason for one in unheld}
        for wish in self.wishes:
            if wish.capability not in capabilities:
                told.append(wish.ignored)
            elif wish.tool is not None and wish.tool in reasons:
                told.append(Ignored(wish.ignored.path, reasons[wish.tool]))
        more = self.num_more + max(0, len(told) - MAX_TOLD)
        told = told[:MAX_TOLD]
        return [*told, Ignored("", f"{more} more fields were ignored")] if more else told


NO_NOTES = Notes()


@dataclass(slots=True)
class Notepad:
    """Gathers a request's notes while it is read. It holds at most `MAX_TOLD` of each kind."""

    _ignored: list[Ignored] = field(default_factory=list)
    _wishes: list[Wish] = field(default_factory=list)
    _num_more: int = 0

    def ignore(self, path: str, reason: str) -> None:
        """No engine does this."""
        if len(self._ignored) < MAX_TOLD:
            self._ignored.append(Ignored(path[:_MAX_PATH], reason))
        else:
            self._num_more += 1

    def wish(self, path: str, reason: str, capability: Capability, tool: str | None = None) -> None:
        """An engine with this capability does it; of any other one the client is told."""
        if len(self._wishes) < MAX_TOLD:
            self._wishes.append(Wish(Ignored(path[:_MAX_PATH], reason), capability, tool))
        else:
            self._num_more += 1

    def notes(self) -> Notes:
        if not (self._ignored or self._wishes):
            return NO_NOTES
        return Notes(tuple(self._ignored), tuple(self._wishes), self._num_more)
