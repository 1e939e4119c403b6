"""The plan of a request: its prompt's segments, their names, and its breakpoints. Pure.

Breakpoints are the client's markers, the automatic marker, and what a key's policy adds. The first
broken rule is reported, in this order: the number of markers, the order of explicit TTLs, the
automatic marker against an explicit one at its place, the order of the automatic TTL.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise

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
from gateway.structs.misses import Section

_ORDER = (
    "a ttl='{longer}' cache_control block must not come after a ttl='{shorter}' cache_control"
    " block. Note that blocks are processed in the following order: `tools`, `system`, `messages`."
)
_SALT_DIGITS = 16
"""How many digits of a salt are in a fingerprint: enough to tell salts apart."""
_TOOL = re.compile(r"tools\[(\d{1,6})\]")
"""The beginning of an engine's message about a tool."""
_TOOL_PATH = re.compile(r"tools[.\[](\d+)\]?$")
"""A tool's path in a request."""
_CALLS = frozenset((CALL, RESULT, CALL.upper(), RESULT.upper()))


def section_of(segment: int, num_tools: int, num_system: int) -> tuple[Section, int]:
    """The section of a prompt's segment, and the segment's place in that section, from 0."""
    if segment < num_tools:
        return "tools", segment
    if segment < num_tools + num_system:
        return "system", segment - num_tools
    return "messages", segment - num_tools - num_system


class Plan(msgspec.Struct, frozen=True, kw_only=True):
    """A request's prompt, its breakpoints and its names."""

    prompt: Prompt
    # The prompt's segments.
    slots: list[Slot]
    breakpoints: list[Breakpoint]
    # The names that the engine gets: at most MAX_NAMES.
    names: list[Name]
    # The bytes of content up to each of these names.
    name_bytes: list[int]
    # All prefixes that have a name.
    prefixes: list[Prefix]
    # The policy that added breakpoints. None where all are the client's.
    policy: AutoCache | None = None
    # The letter of each segment's kind, as in `sketch.py`.
    kinds: str = ""
    sketch: Sketch | None = None
    # The segment at which the look-back for entries ends. None is the rule of 20 positions.
    lookback_to: int | None = None
    # The place in the request of each image's first use, by the image's id.
    image_paths: Mapping[str, str] = {}
    # The parts that need not be exact; None where all must be.
    approximate: Approximate | None = None
    # The digest that narrows the scope (`salt_of`).
    salt: str = ""

    @property
    def paths(self) -> list[str]:
        """Each segment's place in the request."""
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
        """UTF-8 bytes of texts and tool results that become tokens with any template.

        A template may strip blanks, leave thinking out, and write tools in its own way.
        """
        prompt = self.prompt
        if prompt.text is not None:
            return len(prompt.text.encode())
        texts = [block.text for block in prompt.system]
        for message in prompt.messages:
            for part in message.parts:
                if isinstance(part, TextPart | ToolResultPart):
                    texts.append(part.text)
        if prompt.images:
            texts = [IMAGE_REFERENCE.sub("", text) for text in texts]
        return sum(len(text.strip().encode()) for text in texts)

    def in_request(self, message: str) -> str:
        """An engine's message, with the place in the client's request that it is about.

        The place is that of a tool, an image or an approximate part. A tool's number may differ,
        because a prompt from which tools are left out has fewer than the request.
        """
        reference = IMAGE_REFERENCE.match(message)
        if reference is not None:
            return self.image_paths.get(reference[1], "messages") + message[reference.end() :]
        if self.approximate is not None and self.approximate.is_meant(message):
            return self.approximate.in_request(message)
        tool = _TOOL.match(message)
        if tool is None or int(tool[1]) >= len(self.prompt.tools):
            return message
        path = _TOOL_PATH.match(self.slots[int(tool[1])].path)
        return message if path is None else f"tools[{path[1]}]{message[tool.end() :]}"

    def fingerprint(
        self,
        model: str,
        parameters: bytes,
        num_tokens: int,
        name_tokens: Sequence[int],
        *,
        is_shared: bool,
    ) -> Fingerprint:
        """The fingerprint of this prompt, which has `num_tokens` tokens.

        `name_tokens` are the tokens up to each name, as in an engine's receipt. A shared
        fingerprint has all points, because it is compared at once. Any other has only the points
        that are stored.
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
        """Digests of the prefixes at which the breakpoints may find an entry, the deepest first."""
        deepest = max((point.segment for point in self.breakpoints), default=-1)
        for name in reversed(self.names):
            if name.characters is None and name.segment <= deepest:
                yield name.digest

    def deepest_breakpoint(self) -> tuple[str, Ttl] | None:
        """The name and the TTL of the deepest breakpoint; None without one."""
        if not self.breakpoints:
            return None
        point = max(self.breakpoints, key=lambda point: point.segment)
        for name in reversed(self.names):
            if name.segment == point.segment and name.characters is None:
                return name.digest, point.ttl
        return None


def make_plan(
    prompt: Prompt,
    all_slots: Sequence[Slot],
    end_ttl: Ttl | None,
    scope: str,
    policy: AutoCache | None = None,
    adapter: AdapterInfo | None = None,
    wish: ApproximateMark | None = None,
    salt: str = "",
) -> Plan:
    """The plan of a prompt. Raise InvalidRequest where the markers of its slots break a rule.

    - `end_ttl` is the TTL of a marker on the last slot that can carry one, as that of the request's
      own `cache_control`.
    - A `policy` may add breakpoints to the client's (`add_automatic`).
    - `adapter` is the one that answers.
    - `wish` is the header's mark.
    - `salt` narrows the scope. Prompts with different salts, or one without, share no name.
    """
    slots = [slot for slot in all_slots if not slot.is_absent]
    breakpoints = _on_segments(find_breakpoints(all_slots, end_ttl), all_slots)
    num_of_client = len(breakpoints)
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
        holdable = prefixes
        max_names = MAX_NAMES
    else:
        prefixes = find_prefixes(prompt, scope, adapter, approximate.salts)
        holdable = [prefix for prefix in prefixes if approximate.can_hold(prefix)]
        max_names = MAX_NAMES - approximate.num_names
        approximate = approximate.with_names(prompt, scope, prefixes)
    chosen = trim_names(holdable, {point.segment for point in breakpoints}, max_names)
    return Plan(
        prompt=prompt,
        slots=slots,
        breakpoints=breakpoints,
        names=[prefix.name for prefix in chosen],
        name_bytes=[prefix.num_bytes for prefix in chosen],
        prefixes=prefixes,
        policy=policy if len(breakpoints) > num_of_client else None,
        kinds=kinds_of(prompt),
        sketch=sketch_of(prompt, scope),
        approximate=approximate,
        salt=salt,
    )


def _on_segments(points: Sequence[Breakpoint], slots: Sequence[Slot]) -> list[Breakpoint]:
    """The breakpoints by their segments, without the absent slots.

    A breakpoint on an absent slot moves to the segment before it, which has the same prefix. If
    that segment has a breakpoint already, that one stays, since its TTL is at least as long.
    Without a segment before it the breakpoint is dropped.
    """
    # The segment of each slot; that of an absent slot is the one before it, -1 without one.
    segments: list[int] = []
    segment = -1
    for slot in slots:
        if not slot.is_absent:
            segment += 1
        segments.append(segment)
    moved: dict[int, Breakpoint] = {}
    for point in points:
        segment = segments[point.segment]
        if segment >= 0:
            moved.setdefault(segment, replace(point, segment=segment))
    return list(moved.values())


def find_breakpoints(slots: Sequence[Slot], end_ttl: Ttl | None = None) -> list[Breakpoint]:
    """The breakpoints of the slots' markers, in prompt order. Raise InvalidRequest for the first
    broken rule."""
    number = sum(slot.num_markers for slot in slots)
    if end_ttl is not None:
        number += 1
    if number > MAX_BREAKPOINTS:
        raise MarkersBroken(
            f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided."
            f" Found {number}."
        )
    marked = [(index, slot, slot.marker) for index, slot in enumerate(slots) if slot.marker]
    for (_, _, previous_ttl), (_, slot, ttl) in pairwise(marked):
        if outlives(ttl, previous_ttl):
            order = _ORDER.format(longer=ttl, shorter=previous_ttl)
            raise MarkersBroken(f"{slot.path}.cache_control.ttl: {order}")
    breakpoints = [Breakpoint(index, ttl) for index, _, ttl in marked]
    breakpoints = with_wishes(breakpoints, slots)
    if end_ttl is None:
        return breakpoints
    target = find_target(slots)
    if target is None:
        return breakpoints
    explicit = slots[target].marker
    if explicit is not None:
        if explicit != end_ttl:
            raise InvalidRequest(
                f"Top-level cache_control has ttl='{end_ttl}' but the target block already has"
                f" cache_control with ttl='{explicit}'. When both are specified on the same block,"
                " they must have matching TTLs."
            )
        return breakpoints
    # No marker stands behind the last slot that can carry one, so that of `end_ttl` is the last.
    for _, _, ttl in marked:
        if outlives(end_ttl, ttl):
            order = _ORDER.format(longer=end_ttl, shorter=ttl)
            raise MarkersBroken(f"cache_control: {order}")
    return [*breakpoints, Breakpoint(target, end_ttl)]


def mark_latest(
    slots: Sequence[Slot], markers: Sequence[tuple[int, Ttl]], *, room: int
) -> list[Slot]:
    """The slots with the last of `markers`, which are indices and TTLs in prompt order.

    The markers that are there already and the added ones are at most `room` together. An added
    marker gets the longest TTL of the markers behind it, so that no longer TTL follows a shorter
    one. The longer TTL costs nothing, because those markers hold this prefix as well.
    """
    room -= sum(slot.num_markers for slot in slots)
    marked = list(slots)
    longest: Ttl | None = None
    first = max(len(markers) - max(room, 0), 0)
    for index, ttl in reversed(markers[first:]):
        if longest is None or outlives(ttl, longest):
            longest = ttl
        marked[index] = replace(marked[index], marker=longest, num_markers=1)
    return marked


def find_target(slots: Sequence[Slot]) -> int | None:
    """The index of the last slot that can carry a marker; None where no slot can."""
    for index in range(len(slots) - 1, -1, -1):
        if slots[index].can_carry:
            return index
    return None


def add_automatic(
    prompt: Prompt, slots: Sequence[Slot], marked: Sequence[Breakpoint], policy: AutoCache
) -> list[Breakpoint]:
    """The client's breakpoints with those of the policy, in prompt order.

    `slots` are the prompt's segments. If the client marked any, the policy adds only the breakpoint
    at the prompt's end. It adds none if a longer TTL would follow a shorter one.
    """
    if policy.mode == "off" or len(marked) >= MAX_BREAKPOINTS:
        return list(marked)
    by_segment = {point.segment: point for point in marked}
    end = len(prompt.tools) + len(prompt.system) - 1
    ends = [end]
    if policy.mode == "conversation":
        # The segment before the model's last answer, which an earlier turn wrote, and the last one.
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
