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
ALLOWED_REASON = "this model calls freely: it may call the other tools too"
ADVICE = ("cache_prompt", "id_slot", "nvext", "priority", "session_id")
"""What clients of other servers tell of routing, slots and queues: llama.cpp, Dynamo, vLLM, SGLang.
It changes no answer."""
ADVICE_REASON = "this gateway routes and reuses by the prompt itself"
MAX_TOLD = 64
"""The most fields that one answer names. The others are counted in the last item."""
_MAX_PATH = 256


class Ignored(msgspec.Struct, frozen=True):
    """One field that was not done, by its path in the request, and why."""

    path: str
    reason: str


@dataclass(slots=True)
class Notepad:
    """Gathers a request's notes while it is read, at most `MAX_TOLD` of each kind.

    `ignored` is done by no engine. Each of `wishes` is carried out by engines with a capability,
    which may still report that they can't for one tool. `num_more` were left out.
    """

    ignored: list[Ignored] = field(default_factory=list)
    wishes: list[tuple[Ignored, Capability, str | None]] = field(default_factory=list)
    num_more: int = 0

    def ignore(self, path: str, reason: str) -> None:
        """No engine does this."""
        if len(self.ignored) < MAX_TOLD:
            self.ignored.append(Ignored(path[:_MAX_PATH], reason))
        else:
            self.num_more += 1

    def wish(self, path: str, reason: str, capability: Capability, tool: str | None = None) -> None:
        """An engine with this capability does it; of any other one the client is told."""
        if len(self.wishes) < MAX_TOLD:
            self.wishes.append((Ignored(path[:_MAX_PATH], reason), capability, tool))
        else:
            self.num_more += 1

    def told(
        self, capabilities: Collection[Capability], unheld: Iterable[UnheldTool] = ()
    ) -> list[Ignored]:
        """The fields that an engine with these capabilities did not do.

        `unheld` are the tools for which it says that it did not.
        """
        listed = [*self.ignored]
        reasons = {tool.tool: tool.reason for tool in unheld}
        for ignored, capability, tool in self.wishes:
            if capability not in capabilities:
                listed.append(ignored)
            elif tool is not None and tool in reasons:
                listed.append(Ignored(ignored.path, reasons[tool]))
        more = self.num_more + max(0, len(listed) - MAX_TOLD)
        listed = listed[:MAX_TOLD]
        return [*listed, Ignored("", f"{more} more fields were ignored")] if more else listed
