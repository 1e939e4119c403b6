"""What every dialect's lowering does: it builds the prompt, and a slot for each of its segments.

Tools come first, then the system prompt, then the messages in order. Each content part, call and
result is one segment. Neighbours of one role are merged. What no model reads has a placeholder.

Coding agents put a billing line of their own (`x-anthropic-billing-header: …`) into the system
prompt, first of all. Its fields change with every request (github.com/anthropics/claude-code,
issues 24168 and 68900), so it would end every prefix. It is left out where a system block is that
line and nothing else, and where the first system text begins with it and a line break.
"""

import json
import re
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import msgspec

from engine.protocol import (
    ALLOWED_TOOLS,
    MAX_BREAKPOINTS,
    Document,
    Message,
    Part,
    Prompt,
    Role,
    Sampling,
    TextPart,
    Tool,
    ToolChoice,
    Ttl,
    outlives,
)
from gateway.base.catalogue import CatalogueModel
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.dialects.anthropic.request import CacheBreakpoint, CacheControl, CacheTtl
from gateway.dialects.bodies import crossing_fault
from gateway.dialects.unknown import UNKNOWN
from gateway.prompt.approximate import HEADER
from gateway.prompt.ask import SAMPLING_NAMES, Api, Ask, Principal, guarantees_calls
from gateway.prompt.ignored import ALLOWED_REASON, CANNOT_THINK, STRICT_REASON, Notepad
from gateway.prompt.images import ImageReader, ImagesNamed
from gateway.prompt.media import Media, Unreadable, stand_in
from gateway.prompt.names import salt_of
from gateway.prompt.plan import (
    Plan,
    find_target,
    make_plan,
    mark_latest,
)
from gateway.prompt.slots import Slot
from gateway.prompt.wish import ApproximateMark

NATIVE_TTL: CacheTtl = "30m"
"""The TTL of OpenAI's own breakpoints in a request that names none."""
NATIVE_LOOKBACK = 80
"""How many of a conversation's latest breakpoints a request of OpenAI's may read at. Four of them
are written."""
HELD_BY_TTL = "a prefix is held for the TTL of its breakpoint, from its last use on"
IN_MEMORY = "in_memory", "in-memory"
"""Values of `prompt_cache_retention` that ask for no more than a breakpoint's TTL."""
HOSTED = "only its vendor's servers run this tool: the model is told nothing of it"
MAX_NAMED = 512
"""The most tools that a conversation adds to those at the prompt's beginning."""
_encode = msgspec.json.Encoder().encode
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}
_NONCE = re.compile(
    r"x-anthropic-billing-header: cc_version=[A-Za-z0-9.+-]{1,64};"
    r"(?: (?:cch|cc_[a-z_]{1,32})=[A-Za-z0-9_.-]{1,64};){1,10}"
    r"[ \t]*(?:\r?\n|\Z)"
)


@dataclass(frozen=True, slots=True)
class RequestContext:
    """What a request is lowered with, besides its own fields."""

    principal: Principal
    model: CatalogueModel
    # On the monotonic clock, in seconds.
    arrived: float
    # What becomes of images and the like that the model can't read.
    unreadable: Unreadable = "placeholder"
    # Whether billing lines are left out of the prompt.
    removes_nonces: bool = False
    # Whether clients can go on with a response.
    keeps_responses: bool = False
    # The files behind addresses; None where no hosts are listed.
    fetched: Mapping[str, bytes] | None = None
    # What the request's header asks for.
    header_mark: ApproximateMark | None = None


class Lowering:
    """Lays a request out as a prompt with breakpoints."""

    # The complaint about two markers on one place with different TTLs.
    disagreement = "two markers on one place must agree"
    # Whether a marker inside a marked block counts as another one.
    counts_nested = False
    # At how many breakpoints entries are looked for, over any number of positions. None is the rule
    # of 20 positions.
    lookback: int | None = None

    def __init__(self, context: RequestContext) -> None:
        self.context = context
        self.notepad = Notepad()
        self.images = ImageReader(context.principal.scope, context.fetched)
        self.slots: list[Slot] = []
        self.tools: list[Tool] = []
        self.system: list[TextPart] = []
        self.messages: list[Message] = []
        # The lower bound of the TTLs of OpenAI's own breakpoints.
        self.native_ttl: CacheTtl = NATIVE_TTL
        # Their slots and TTLs.
        self._native: list[tuple[int, Ttl]] = []
        self._strict: list[tuple[str, str]] = []
        self._num_removed = 0

    def plan(
        self,
        policy: AutoCache | None = None,
        end_ttl: Ttl | None = None,
        named: Sequence[Tool] = (),
        *,
        cache_salt: str | None = None,
        adds_native: bool = False,
    ) -> Plan:
        """The plan of the prompt that was read.

        `policy` and `end_ttl` are those of `make_plan`. `named` are tools that the conversation
        names. With a `cache_salt` nothing is read that was written with another one or with none.
        `adds_native` puts one of OpenAI's own markers at the prompt's end. Of OpenAI's markers the
        latest count: as many as the other breakpoints leave.

        Raise InvalidRequest where the markers break a rule, and ImagesNamed for images that must be
        fetched first.
        """
        if self.images.unfetched:
            raise ImagesNamed(self.images.unfetched)
        by_policy = policy is not None and policy.mode == "conversation"
        is_implicit = end_ttl is not None or adds_native or by_policy
        room = MAX_BREAKPOINTS - is_implicit
        slots = mark_latest(self.slots, self._native, room=room)
        if adds_native:
            end_ttl = self._ttl_at_end(slots)
        prompt = Prompt(
            self.messages,
            self.tools,
            self.system,
            named_tools=list(named),
            images=[*self.images.images.values()],
        )
        scope = self.context.principal.scope
        adapter = self.context.model.weights
        if self.context.header_mark is not None:
            self.check_approximate(HEADER)
        plan = make_plan(
            prompt,
            slots,
            end_ttl,
            scope,
            policy,
            adapter,
            self.context.header_mark,
            salt_of(cache_salt, scope),
        )
        if self.images.images:
            plan = msgspec.structs.replace(plan, image_paths=self.images.paths)
        if self.lookback is None:
            return plan
        marked = {point.segment for point in plan.breakpoints}
        ends = list(accumulate(not slot.is_absent for slot in self.slots))
        marked |= {ends[index] - 1 for index, _ in self._native if ends[index]}
        oldest = sorted(marked)[-self.lookback] if len(marked) >= self.lookback else 0
        return msgspec.structs.replace(plan, lookback_to=oldest)

    def _ttl_at_end(self, slots: Sequence[Slot]) -> Ttl | None:
        """The TTL of OpenAI's own marker at the prompt's end. Where the client marked that place,
        it is the client's TTL."""
        target = find_target(slots)
        if target is not None and target in {index for index, _ in self._native}:
            return slots[target].marker
        return self.native_ttl

    def ask(
        self, dialect: Api, plan: Plan, sampling: Sampling, thinks_by: str | None, **more: Any
    ) -> Ask:
        """`thinks_by` is the field that asks for thinking; `more` are the other fields of the Ask.

        Strict tools are wishes where calls are not held to their schemas anyway.
        """
        bound = [more.get(name) for name in ("output_schema", "output_pattern")]
        is_bound = any(bound_value is not None for bound_value in bound)
        if not guarantees_calls(more.get("tool_choice", ToolChoice()), has_schema=is_bound):
            for path, name in self._strict:
                self.notepad.wish(path, STRICT_REASON, "strict_tools", name)
        if thinks_by is not None:
            self.notepad.wish(thinks_by, CANNOT_THINK, "thinking")
        return Ask(
            dialect=dialect,
            principal=self.context.principal,
            model=self.context.model,
            arrived=self.context.arrived,
            plan=plan,
            sampling=sampling,
            thinking=thinks_by is not None,
            notes=self.notepad,
            num_removed=self._num_removed,
            **more,
        )

    def add(self, role: Role, parts: Sequence[Part]) -> None:
        """Add the parts of a message. Neighbours of one role become one message."""
        if not parts:
            return
        if self.messages and self.messages[-1].role == role:
            self.messages[-1].parts.extend(parts)
        else:
            self.messages.append(Message(role, list(parts)))

    def leave_out(self, paths: Sequence[str]) -> None:
        """Note the paths of unknown fields that were left out of the request."""
        for path in paths:
            self.notepad.ignore(path, UNKNOWN)

    def allow(
        self, path: str, names: Collection[str], among: Collection[str], *, parallel: bool
    ) -> ToolChoice:
        """The choice that lets the model call only the tools in `names`, out of those in `among`.

        All tools stay in the prompt, so that the choice changes no prefix.
        """
        if not names:
            return ToolChoice("none", parallel=parallel)
        if set(names) == set(among):
            return ToolChoice("auto", parallel=parallel)
        self.notepad.wish(path, ALLOWED_REASON, "strict_tools", ALLOWED_TOOLS)
        return ToolChoice("auto", parallel=parallel, names=sorted(names))

    def add_told(self, texts: Sequence[TextPart]) -> None:
        """Add the texts of a system message. They are in the system prompt until another message
        comes."""
        if self.messages:
            self.add("system", texts)
        else:
            self.system.extend(texts)

    def without_nonce(self, text: str, *, is_first: bool) -> str | None:
        """A system text without the billing line at its beginning; None if it is only that line."""
        line = _NONCE.match(text) if self.context.removes_nonces else None
        if line is None or (line.end() < len(text) and not is_first):
            return text
        self._num_removed += 1
        return text[line.end() :] or None

    def mark(
        self,
        path: str,
        *markers: CacheControl | None,
        native: CacheBreakpoint | None = None,
        can_carry: bool = True,
        is_absent: bool = False,
    ) -> None:
        """Add the next segment's slot, or the slot of a block that is kept out of the prompt."""
        marks = [marker for marker in markers if marker is not None]
        ttls = [marker.ttl for marker in marks]
        kept = [marker.holdfast for marker in marks if marker.holdfast is not None]
        if kept:
            where = f"{path}.cache_control.holdfast"
            self.check_approximate(where)
            if is_absent:
                raise InvalidRequest(f"{where}: nothing of this block is in the prompt")
            if any(marker.holdfast != kept[0] for marker in marks):
                raise InvalidRequest(f"{where}: two markers in one place ask for different things")
            kept[0].check(where)
        if len(set(ttls)) > 1:
            raise InvalidRequest(f"{path}.cache_control.ttl: {self.disagreement}")
        if native is not None and not ttls:
            self.mark_native(native)
        wish = kept[0].wish(ttls[0]) if kept else None
        if isinstance(wish, Document):
            ttls = []  # it marks the block, not the prompt up to its end
        self.slots.append(
            Slot(
                path=path,
                marker=ttls[0] if ttls else None,
                num_markers=len(ttls) if self.counts_nested else min(len(ttls), 1),
                can_carry=can_carry and not is_absent,
                is_absent=is_absent,
                approximate=wish,
            )
        )

    def check_approximate(self, path: str) -> None:
        """Raise InvalidRequest where nothing may be approximate."""
        if not self.context.principal.may_approximate:
            raise InvalidRequest(f"{path}: this workspace may not ask for approximations")
        if self.context.model.weights is not None:
            raise InvalidRequest(f"{path}: not with an adapter")

    def mark_native(self, marker: CacheBreakpoint) -> None:
        """Mark the next slot. The request's TTL is a lower bound of each breakpoint's TTL."""
        ttl = marker.ttl or self.native_ttl
        if outlives(self.native_ttl, ttl):
            ttl = self.native_ttl
        self._native.append((len(self.slots), ttl))

    def stand_in(self, path: str, media: Media) -> str:
        """The reference of an image that the model sees, else a placeholder.

        Raise InvalidRequest where the setting refuses what no model here reads.
        """
        if media.kind == "image" and self.context.model.sees:
            if media.detail not in (None, "auto"):
                self.notepad.ignore(f"{path}.detail", "the model has one size for an image")
            return self.images.read(path, media)
        return stand_in(path, media, self.context.unreadable, self.notepad)

    def tool(
        self,
        path: str,
        name: str,
        schema: dict[str, Any] | None,
        description: str | None,
        *,
        strict: bool | None = False,
    ) -> Tool:
        """A tool of the prompt. `path` is the path of the object that has the field `strict`."""
        if strict:
            self._strict.append((f"{path}.strict", name))
        return Tool(name, NO_PARAMETERS if schema is None else schema, description, bool(strict))


def definition_of(tool: Tool) -> str:
    """What a conversation says of a tool that the model may call from there on."""
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    return "Tool: " + _encode({"type": "function", "function": function}).decode()


def automatic_ttl(marker: CacheControl) -> Ttl:
    """The TTL of a request's own marker, which marks its last block."""
    if marker.holdfast is not None:
        raise InvalidRequest("cache_control.holdfast: must be in a block's marker")
    return marker.ttl


def uncallable(path: str) -> InvalidRequest:
    """The error for forcing the call of a tool that the model can't call."""
    return InvalidRequest(f"{path}: no tool that may be called here can be forced: {HOSTED}", path)


def arguments_of(text: str) -> dict[str, Any] | str:
    """The input of a call that is JSON in a string.

    The text is returned as it is if it is no JSON object, or if the object can't cross to an
    engine. A model's call may be cut anywhere, and its conversation goes on with it.
    """
    try:
        arguments = msgspec.json.decode(text or "{}")
    except (msgspec.MsgspecError, UnicodeError, RecursionError):
        return text
    is_object = isinstance(arguments, dict) and crossing_fault(arguments) is None
    return arguments if is_object else text


def input_of(value: dict[str, Any]) -> dict[str, Any] | str:
    """The input of a call that is an object; its text where it can't cross to an engine."""
    return value if crossing_fault(value) is None else json.dumps(value, ensure_ascii=False)


def text_in(data: str) -> str | None:
    """The text in base64; None where it is no text in UTF-8."""
    try:
        return b64decode(data, validate=True).decode()
    except (Base64Error, ValueError):
        return None


def split_data_url(url: str) -> tuple[str, str]:
    """Media type and data of a `data:` URL (RFC 2397); both empty for any other address."""
    if url[:5].lower() != "data:":
        return "", ""
    head, _, data = url[5:].partition(",")
    return head[:256].partition(";")[0], data


_SAMPLING_FIELDS = {
    api: [(name, names.get(name, name)) for name in Sampling.__struct_fields__]
    for api, names in SAMPLING_NAMES.items()
}
"""The fields of Sampling, each with its name in the API."""


def sampling_of(request: msgspec.Struct, api: Api, **changed: Any) -> Sampling:
    """The sampling that a request asks for. The request's fields have the API's names. A `top_p` of
    0 leaves the most likely token, like a temperature of 0."""
    fields: dict[str, Any] = {"max_tokens": None}
    for name, native in _SAMPLING_FIELDS[api]:
        value = getattr(request, native, None)
        if value is not None:
            fields[name] = value
    fields |= changed
    if fields.get("top_p") == 0:
        fields |= {"temperature": 0.0, "top_p": None}
    return Sampling(**fields)
