"""The plan of a request: its prompt, breakpoints and names."""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import msgspec

from engine.protocol import Breakpoint, Name, Prompt, TextPart, ToolResultPart, Ttl
from gateway.base.grants import AutoCache
from gateway.prompt.breakpoints import Layout, Slot, add_automatic, find_breakpoints, leave_out
from gateway.prompt.names import CALL, RESULT, NamedText, Prefix, Recent, find_prefixes, trim_names
from gateway.prompt.sketch import Sketch, Sketched, kinds_of, sketch_of

_TOOL = re.compile(r"tools\[(\d{1,6})\]")
_OWN = re.compile(r"tools[.\[](\d+)\]?$")
_CALLS = frozenset((CALL, RESULT, CALL.upper(), RESULT.upper()))
_END_CHARACTERS = 1024
_PIECE_CHARACTERS = 1 << 16
_SURE = (TextPart, ToolResultPart)
_MAX_SKETCHED = 10_000
"""At some 500 bytes each."""
_MAX_TEXTS = 1024
"""At 2 to 15 KB each."""


@dataclass(frozen=True, slots=True)
class PlanMemory:
    """The same for all workspaces, each of which finds its own: the keys depend on its scope."""

    sketched: Recent[Sketched] = field(default_factory=lambda: Recent(_MAX_SKETCHED))
    texts: Recent[NamedText] = field(default_factory=lambda: Recent(_MAX_TEXTS))


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """`slots` are the prompt's segments, `names` a bounded choice of its `prefixes`, of which
    `name_bytes` are the lengths. `automatic` is the policy that made breakpoints, None where all
    are the client's. `sure_bytes`: see the function. `kinds` and `sketch`: see `sketch.py`."""

    prompt: Prompt
    slots: list[Slot]
    breakpoints: list[Breakpoint]
    names: list[Name]
    name_bytes: list[int]
    prefixes: list[Prefix]
    sure_bytes: int
    automatic: AutoCache | None = None
    kinds: str = ""
    sketch: Sketch | None = None

    @property
    def has_calls(self) -> bool:
        """Whether the messages have calls of tools, or their results."""
        return not _CALLS.isdisjoint(self.kinds)

    @property
    def num_bytes(self) -> int:
        """All content of the prompt, in UTF-8 and JSON."""
        return self.prefixes[-1].num_bytes if self.prefixes else 0

    def in_request(self, message: str) -> str:
        """An engine's message about a tool, by the tool's number in the client's list.

        The prompt has fewer tools where some are left out.
        """
        said = _TOOL.match(message)
        if said is None or int(said[1]) >= len(self.prompt.tools):
            return message
        own = _OWN.match(self.slots[int(said[1])].path)
        return message if own is None else f"tools[{own[1]}]{message[said.end() :]}"

    def marked_prefixes(self) -> Iterator[str]:
        """Digests of the prefixes at which a breakpoint may find an entry, deepest first."""
        deepest = max((point.segment for point in self.breakpoints), default=-1)
        for name in reversed(self.names):
            if name.characters is None and name.segment <= deepest:
                yield name.digest

    def deepest_marked(self) -> tuple[str, Ttl] | None:
        """Name and TTL of the longest prefix that the client marked, None without a marker."""
        if not self.breakpoints:
            return None
        point = max(self.breakpoints, key=lambda point: point.segment)
        for name in self.names:
            if name.segment == point.segment and name.characters is None:
                return name.digest, point.ttl
        return None


def make_plan(
    layout: Layout,
    automatic: Ttl | None,
    scope: str,
    policy: AutoCache | None = None,
    memory: PlanMemory | None = None,
) -> Plan:
    """Raise InvalidRequest where the markers break a rule; `automatic` marks the last slot.

    `memory` has what earlier plans made of the same prefixes.

    With a `policy` there may be more breakpoints than the client's (`breakpoints.py`).
    """
    slots, breakpoints = leave_out(layout.slots, find_breakpoints(layout.slots, automatic))
    num_given = len(breakpoints)
    if policy is not None:
        breakpoints = add_automatic(layout.prompt, slots, breakpoints, policy)
    marked = {breakpoint_.segment for breakpoint_ in breakpoints}
    prefixes = find_prefixes(layout.prompt, scope, memory.texts if memory else None)
    named = trim_names(prefixes, marked)
    ends = [name.digest for name, _ in prefixes if name.characters is None]
    return Plan(
        prompt=layout.prompt,
        slots=slots,
        breakpoints=breakpoints,
        names=[prefix.name for prefix in named],
        name_bytes=[prefix.num_bytes for prefix in named],
        prefixes=prefixes,
        automatic=policy if len(breakpoints) > num_given else None,
        sure_bytes=sure_bytes(layout.prompt),
        kinds=kinds_of(layout.prompt),
        sketch=sketch_of(layout.prompt, scope, ends, memory.sketched if memory else None),
    )


def sure_bytes(prompt: Prompt) -> int:
    """How many UTF-8 bytes of texts and tool results become tokens with every template.

    A template may strip blanks, leave thinking out, and write tools in another way.
    """
    if prompt.text is not None:
        return _num_bytes(prompt.text)
    texts = [block.text for block in prompt.system]
    for message in prompt.messages:
        texts += [p.text for p in message.parts if isinstance(p, _SURE)]
    return sum(len(text) if _is_plain(text) else _num_kept(text) for text in texts)


def _is_plain(text: str) -> bool:
    """Whether each character is a byte, and none of them a blank at an end."""
    return text.isascii() and not (text[:1].isspace() or text[-1:].isspace())


def _num_kept(text: str) -> int:
    """The bytes without blanks at the ends. A long text is not copied for that, since a copy of
    many megabytes holds the interpreter's lock."""
    if len(text) > 2 * _END_CHARACTERS:
        head, tail = text[:_END_CHARACTERS], text[-_END_CHARACTERS:]
        if not (head.isspace() or tail.isspace()):
            kept = _num_bytes(head.lstrip()) + _num_bytes(tail.rstrip())
            return _num_bytes(text) - _num_bytes(head) - _num_bytes(tail) + kept
    return _num_bytes(text.strip())


def _num_bytes(text: str) -> int:
    if text.isascii():
        return len(text)
    starts = range(0, len(text), _PIECE_CHARACTERS)
    return sum(len(text[start : start + _PIECE_CHARACTERS].encode()) for start in starts)
