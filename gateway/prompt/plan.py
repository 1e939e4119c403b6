"""The plan of a request: its prompt's segments, names, and where a prefix is held. Pure.

Held is what the client marks, what the automatic marker marks, and what a key's policy adds. Broken
rules are reported in the order count, explicit TTL order, automatic against explicit, automatic TTL
order.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import msgspec
from msgspec.structs import replace

from engine.protocol import (
    IMAGE_REFERENCE,
    MAX_BREAKPOINTS,
    MAX_NAMES,
    Breakpoint,
    Name,
    Prompt,
    TextPart,
    ToolResultPart,
    Ttl,
    outlives,
)
from engine.protocol.reports import AdapterInfo
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.prompt.approximate import Approximate, approximate_of, with_header, with_wishes
from gateway.prompt.fingerprint import Fingerprint, few_of, kinds_at, points_of
from gateway.prompt.names import (
    CALL,
    NAMES_RULE,
    RESULT,
    Prefix,
    find_prefixes,
    trim_names,
)
from gateway.prompt.sketch import Sketch, kinds_of, sketch_of
from gateway.prompt.slots import MarkersBroken, Slot
from gateway.prompt.wish import ApproximateMark
from gateway.structs.usage import Section

_ORDER = (
    "a ttl='{longer}' cache_control block must not come after a ttl='{shorter}' cache_control"
    " block. Note that blocks are processed in the following order: `tools`, `system`, `messages`."
)
_SALT_DIGITS = 16
"""Of a salt, in a fingerprint: enough that no two are taken for one."""
_TOOL = re.compile(r"tools\[(\d{1,6})\]")
_OWN = re.compile(r"tools[.\[](\d+)\]?$")
_CALLS = frozenset((CALL, RESULT, CALL.upper(), RESULT.upper()))


def section_of(segment: int, num_tools: int, num_system: int) -> tuple[Section, int]:
    """The section of a prompt's segment, and its place there, from 0."""
    if segment < num_tools:
        return "tools", segment
    if segment < num_tools + num_system:
        return "system", segment - num_tools
    return "messages", segment - num_tools - num_system


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A request's prompt, and what of it is held and looked for."""

    prompt: Prompt
    # The prompt's segments.
    slots: list[Slot]
    breakpoints: list[Breakpoint]
    # A bounded choice of the names of the prefixes, and the bytes of content up to each.
    names: list[Name]
    name_bytes: list[int]
    prefixes: list[Prefix]
    # The policy that made breakpoints. None where all are the client's.
    automatic: AutoCache | None = None
    # The letters of the segments' kinds, and the sketch of the prompt: `sketch.py`.
    kinds: str = ""
    sketch: Sketch | None = None
    # The segment to which entries are looked for over any number of positions. None is the rule of
    # 20 positions.
    lookback_to: int | None = None
    # Where in the request each of the prompt's images stands first, by its id.
    image_paths: Mapping[str, str] = {}
    # What of it may be no exact answer; None where all is exact.
    approximate: Approximate | None = None
    # What tells it apart within its scope: `salt_of`.
    salt: str = ""

    @property
    def paths(self) -> list[str]:
        """Where each segment stands in the request."""
        return [slot.path for slot in self.slots]

    @property
    def has_calls(self) -> bool:
        """Whether the messages have calls of tools, or their results."""
        return not _CALLS.isdisjoint(self.kinds)

    @property
    def num_bytes(self) -> int:
        """All content of the prompt, in UTF-8 and JSON."""
        return self.prefixes[-1].num_bytes if self.prefixes else 0

    @property
    def sure_bytes(self) -> int:
        """How many UTF-8 bytes of texts and tool results become tokens with every template.

        A template may strip blanks, leave thinking out, and write tools in another way.
        """
        prompt = self.prompt
        if prompt.text is not None:
            return len(prompt.text.encode())
        texts = [block.text for block in prompt.system]
        for message in prompt.messages:
            texts += [p.text for p in message.parts if isinstance(p, TextPart | ToolResultPart)]
        if prompt.images:
            texts = [IMAGE_REFERENCE.sub("", text) for text in texts]
        return sum(len(text.strip().encode()) for text in texts)

    def in_request(self, message: str) -> str:
        """An engine's message about a tool, by the tool's number in the client's list, or about an
        image or what is to be approximate, by its place.

        The prompt has fewer tools where some are left out.
        """
        reference = IMAGE_REFERENCE.match(message)
        if reference is not None:
            return self.image_paths.get(reference[1], "messages") + message[reference.end() :]
        if self.approximate is not None and self.approximate.is_meant(message):
            return self.approximate.in_request(message)
        said = _TOOL.match(message)
        if said is None or int(said[1]) >= len(self.prompt.tools):
            return message
        owner_path = _OWN.match(self.slots[int(said[1])].path)
        return message if owner_path is None else f"tools[{owner_path[1]}]{message[said.end() :]}"

    def fingerprint(
        self,
        model: str,
        parameters: bytes,
        num_tokens: int,
        name_tokens: Sequence[int],
        *,
        is_shared: bool,
    ) -> Fingerprint:
        """The fingerprint of this prompt, which has `num_tokens`.

        `name_tokens` go with the names, as in an engine's receipt. It has all points where it is
        shared: compared with an earlier one. Else it has those that are kept.
        """
        num_tools = len(self.prompt.tools)
        num_system = len(self.prompt.system)
        prefixes = self.prefixes
        if not is_shared:
            prefixes = few_of(prefixes, num_tools, num_system)
        points = points_of(prefixes)
        places = ((name.segment, name.characters) for name in self.names)
        tokens_at = dict(zip(places, name_tokens, strict=False))
        return Fingerprint(
            model=model,
            parameters=parameters,
            num_tools=num_tools,
            num_system=num_system,
            points=points,
            num_tokens=num_tokens,
            is_shared=is_shared,
            tokens=[tokens_at.get(point.place, 0) for point in points],
            kinds=kinds_at(points, self.kinds),
            marks=[(point.segment, point.ttl) for point in self.breakpoints],
            sketch=self.sketch,
            rule=NAMES_RULE,
            salt=self.salt[:_SALT_DIGITS],
            unheld=[point.segment for point in self.breakpoints if not point.hold],
        )

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
    prompt: Prompt,
    slots_given: Sequence[Slot],
    automatic: Ttl | None,
    scope: str,
    policy: AutoCache | None = None,
    adapter: AdapterInfo | None = None,
    wish: ApproximateMark | None = None,
    salt: str = "",
) -> Plan:
    """Raise InvalidRequest where the markers of the `given` slots break a rule; `automatic` marks
    the last one.

    With a `policy` there may be more breakpoints than the client's (`add_automatic`). `adapter`
    is the one that answers. `wish` is the header's. A `salt` narrows the scope: no name of the
    prompt is one of a prompt with another salt, or with none.
    """
    slots = [slot for slot in slots_given if not slot.is_absent]
    breakpoints = _on_segments(find_breakpoints(slots_given, automatic), slots_given)
    num_given = len(breakpoints)
    if policy is not None:
        breakpoints = add_automatic(prompt, slots, breakpoints, policy)
    if wish is not None:
        num_head = len(prompt.tools) + len(prompt.system)
        breakpoints = with_header(wish, breakpoints, num_head)
    approximate = approximate_of(slots, breakpoints, has_header=wish is not None)
    if salt:
        if approximate is not None:
            raise InvalidRequest("cache_salt: excludes approximations, which no salt keeps apart")
        if adapter is not None:
            raise InvalidRequest("cache_salt: excludes adapters, whose prefixes have no salt")
        scope = f"{scope}/{salt}"
    if approximate is None:
        prefixes = find_prefixes(prompt, scope, adapter)
        held = prefixes
        most = MAX_NAMES
    else:
        prefixes = find_prefixes(prompt, scope, adapter, approximate.salts)
        held = [prefix for prefix in prefixes if approximate.can_hold(prefix)]
        most = MAX_NAMES - approximate.num_names
        approximate = approximate.with_names(prompt, scope, prefixes)
    named = trim_names(held, {point.segment for point in breakpoints}, most)
    return Plan(
        prompt=prompt,
        slots=slots,
        breakpoints=breakpoints,
        names=[prefix.name for prefix in named],
        name_bytes=[prefix.num_bytes for prefix in named],
        prefixes=prefixes,
        automatic=policy if len(breakpoints) > num_given else None,
        kinds=kinds_of(prompt),
        sketch=sketch_of(prompt, scope),
        approximate=approximate,
        salt=salt,
    )


def _on_segments(points: Sequence[Breakpoint], slots: Sequence[Slot]) -> list[Breakpoint]:
    """The breakpoints by their segments, without the absent slots.

    One on an absent slot moves to the segment before, which has the same prefix, unless that has
    one already, of no shorter TTL. Without a segment before it is dropped.
    """
    segments = [count - 1 for count in accumulate(not slot.is_absent for slot in slots)]
    moved: dict[int, Breakpoint] = {}
    for point in points:
        segment = segments[point.segment]
        if segment >= 0:
            moved.setdefault(segment, replace(point, segment=segment))
    return list(moved.values())


def find_breakpoints(slots: Sequence[Slot], automatic: Ttl | None = None) -> list[Breakpoint]:
    """Return the breakpoints in prompt order, or raise for the first broken rule."""
    number = sum(slot.num_markers for slot in slots) + (automatic is not None)
    if number > MAX_BREAKPOINTS:
        raise MarkersBroken(
            f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided."
            f" Found {number}."
        )
    marked = [(index, slot, slot.marker) for index, slot in enumerate(slots) if slot.marker]
    for (_, _, before), (_, slot, ttl) in pairwise(marked):
        if outlives(ttl, before):
            order = _ORDER.format(longer=ttl, shorter=before)
            raise MarkersBroken(f"{slot.path}.cache_control.ttl: {order}")
    breakpoints = [Breakpoint(index, ttl) for index, _, ttl in marked]
    breakpoints = with_wishes(breakpoints, slots)
    if automatic is None:
        return breakpoints
    target = find_target(slots)
    if target is None:
        return breakpoints
    already = slots[target].marker
    if already is not None:
        if already != automatic:
            raise InvalidRequest(
                f"Top-level cache_control has ttl='{automatic}' but the target block already has"
                f" cache_control with ttl='{already}'. When both are specified on the same block,"
                " they must have matching TTLs."
            )
        return breakpoints
    # A marker cannot sit after the last slot that can carry one, so the target is the last.
    for _, _, ttl in marked:
        if outlives(automatic, ttl):
            order = _ORDER.format(longer=automatic, shorter=ttl)
            raise MarkersBroken(f"cache_control: {order}")
    return [*breakpoints, Breakpoint(target, automatic)]


def mark_latest(
    slots: Sequence[Slot], wanted: Sequence[tuple[int, Ttl]], *, room: int
) -> list[Slot]:
    """The slots with markers on the last of `wanted`, which are indices and TTLs in prompt order.

    The markers that are there already count: in all there are at most `room` of them. What one of
    them holds is a part of what those behind it hold, so it has the longest of their TTLs: it costs
    nothing more, and no longer TTL comes after a shorter one.
    """
    room -= sum(slot.num_markers for slot in slots)
    marked = list(slots)
    longest: Ttl | None = None
    for index, ttl in reversed(wanted[max(len(wanted) - max(room, 0), 0) :]):
        if longest is None or outlives(ttl, longest):
            longest = ttl
        marked[index] = replace(marked[index], marker=longest, num_markers=1)
    return marked


def find_target(slots: Sequence[Slot]) -> int | None:
    """The last slot that can carry a marker; ineligible ones are passed over silently."""
    for index in range(len(slots) - 1, -1, -1):
        if slots[index].can_carry:
            return index
    return None


def add_automatic(
    prompt: Prompt, slots: Sequence[Slot], marked: Sequence[Breakpoint], policy: AutoCache
) -> list[Breakpoint]:
    """The client's breakpoints with those of the policy, in prompt order; `slots` are the prompt's
    segments. Behind a client's own only the one after the last turn is added: a shorter TTL may not
    come before a longer one."""
    if policy.mode == "off" or len(marked) >= MAX_BREAKPOINTS:
        return list(marked)
    by_segment = {point.segment: point for point in marked}
    end = len(prompt.tools) + len(prompt.system) - 1
    ends = [end]
    if policy.mode == "conversation":
        # Also the last segment before the last answer of the model, and the last one.
        before_answer = -1
        for message in prompt.messages:
            if message.role == "assistant":
                before_answer = end
            end += len(message.parts)
        ends += [before_answer, len(slots) - 1]
    places = (find_target(slots[: end + 1]) for end in ends)
    targets = [place for place in places if place is not None]
    if marked:
        targets = targets[-1:] if policy.mode == "conversation" else []
    for segment in targets:
        by_segment.setdefault(segment, Breakpoint(segment, policy.ttl, hold=policy.hold))
    points = [by_segment[segment] for segment in sorted(by_segment)]
    if any(outlives(later.ttl, earlier.ttl) for earlier, later in pairwise(points)):
        return list(marked)
    return points
