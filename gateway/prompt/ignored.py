"""Fields of a request that were ignored: the answer names them, and the request does not fail.

A field that only asks for an improvement (display, effort, strictness, thinking) never fails a
request. The reader of a dialect notes it here, with its path. A field that would change the
answer's meaning is refused, or a placeholder stands for it in the prompt (`prompt/media.py`).
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import msgspec

from engine.protocol import Capability, UnheldTool

CANNOT_THINK = "this model does not think"
STRICT_REASON = "this model writes calls freely: one may differ from the tool's schema"
ALLOWED_REASON = "this model calls freely: it may call the other tools too"
ADVICE = ("cache_prompt", "id_slot", "nvext", "priority", "session_id")
"""Fields with which clients of other servers (llama.cpp, Dynamo, vLLM, SGLang) give advice on
routing, slots and queues. They do not change an answer."""
ADVICE_REASON = "this gateway routes and reuses by the prompt itself"
MAX_TOLD = 64
"""The most fields that one answer names. Its last item counts the others."""
_MAX_PATH = 256


class Ignored(msgspec.Struct, frozen=True):
    """One field that was ignored, by its path in the request, and why."""

    path: str
    reason: str


@dataclass(slots=True)
class Notepad:
    """Gathers a request's notes while it is read, at most `MAX_TOLD` of each kind."""

    # Fields that every engine ignores.
    ignored: list[Ignored] = field(default_factory=list)
    # Fields that only engines with a capability carry out, and the tool that a field is about. An
    # engine with the capability may still report that it can't carry it out for this tool.
    wishes: list[tuple[Ignored, Capability, str | None]] = field(default_factory=list)
    # How many further fields are only counted.
    num_more: int = 0

    def ignore(self, path: str, reason: str) -> None:
        """Note a field that every engine ignores."""
        if len(self.ignored) < MAX_TOLD:
            self.ignored.append(Ignored(path[:_MAX_PATH], reason))
        else:
            self.num_more += 1

    def wish(self, path: str, reason: str, capability: Capability, tool: str | None = None) -> None:
        """Note a field that only engines with this capability carry out."""
        if len(self.wishes) < MAX_TOLD:
            self.wishes.append((Ignored(path[:_MAX_PATH], reason), capability, tool))
        else:
            self.num_more += 1

    def ignored_by(
        self, capabilities: Collection[Capability], unheld: Iterable[UnheldTool] = ()
    ) -> list[Ignored]:
        """The fields that an engine with these capabilities did not carry out.

        `unheld` are the tools for which the engine reports that it did not.
        """
        fields = [*self.ignored]
        reasons = {tool.tool: tool.reason for tool in unheld}
        for ignored, capability, tool in self.wishes:
            if capability not in capabilities:
                fields.append(ignored)
            elif tool is not None and tool in reasons:
                fields.append(Ignored(ignored.path, reasons[tool]))
        num_more = self.num_more + max(0, len(fields) - MAX_TOLD)
        fields = fields[:MAX_TOLD]
        if num_more:
            fields.append(Ignored("", f"{num_more} more fields were ignored"))
        return fields
