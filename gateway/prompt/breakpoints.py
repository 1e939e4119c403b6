"""A prompt's segments in the request, and where a prefix is held: what the client marks,
the automatic marker, and what a key's policy adds. Pure.

Broken rules are reported in the order count, explicit TTL order, automatic against explicit,
automatic TTL order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import msgspec
from msgspec.structs import replace

from engine.protocol import MAX_BREAKPOINTS, Breakpoint, Prompt, Ttl, outlives
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache

_ORDER = (
    "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that"
    " blocks are processed in the following order: `tools`, `system`, `messages`."
)


class Slot(msgspec.Struct, frozen=True, kw_only=True):
    """One segment's place in the request, and the marker on it.

    `is_absent`: the block is kept out of the prompt and makes no segment.
    """

    path: str
    marker: Ttl | None = None
    num_markers: int = 0
    can_carry: bool = True
    is_absent: bool = False


@dataclass(frozen=True, slots=True)
class Layout:
    prompt: Prompt
    slots: list[Slot]


class MarkersBroken(InvalidRequest):
    """There are too many markers, or they stand in a wrong order."""


def find_breakpoints(slots: Sequence[Slot], automatic: Ttl | None = None) -> list[Breakpoint]:
    """Return the breakpoints in prompt order, or raise for the first broken rule."""
    found = sum(slot.num_markers for slot in slots) + (automatic is not None)
    if found > MAX_BREAKPOINTS:
        raise MarkersBroken(
            f"A maximum of {MAX_BREAKPOINTS} blocks with cache_control may be provided."
            f" Found {found}."
        )
    marked = [(index, slot, slot.marker) for index, slot in enumerate(slots) if slot.marker]
    _check_order(marked)
    breakpoints = [Breakpoint(index, ttl) for index, _, ttl in marked]
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
    if any(outlives(automatic, ttl) for _, _, ttl in marked):
        raise MarkersBroken(f"cache_control: {_ORDER}")
    return [*breakpoints, Breakpoint(target, automatic)]


def leave_out(
    slots: Sequence[Slot], breakpoints: Sequence[Breakpoint]
) -> tuple[list[Slot], list[Breakpoint]]:
    """Leave out the absent slots: those that stay are the prompt's segments.

    The breakpoints then name segments. A breakpoint on an absent slot moves to the segment before,
    which has the same prefix. If that segment has a breakpoint, that one stays; its TTL is not
    shorter. If there is no segment before, the breakpoint is dropped.
    """
    segments: list[int] = []
    for slot in slots:
        segments.append((segments[-1] if segments else -1) + (not slot.is_absent))
    moved: dict[int, Breakpoint] = {}
    for point in breakpoints:
        segment = segments[point.segment]
        if segment >= 0:
            moved.setdefault(segment, Breakpoint(segment, point.ttl))
    return [slot for slot in slots if not slot.is_absent], list(moved.values())


def mark_latest(slots: Sequence[Slot], wanted: Sequence[int], ttl: Ttl, *, room: int) -> list[Slot]:
    """The slots with markers on the last of `wanted`.

    The markers that are there already count: in all there are at most `room` of them.
    """
    room -= sum(slot.num_markers for slot in slots)
    marked = list(slots)
    for index in wanted[max(len(wanted) - max(room, 0), 0) :]:
        marked[index] = replace(marked[index], marker=ttl, num_markers=1)
    return marked


def find_target(slots: Sequence[Slot]) -> int | None:
    """The last slot that can carry a marker; ineligible ones are passed over silently."""
    for index in range(len(slots) - 1, -1, -1):
        if slots[index].can_carry:
            return index
    return None


def _check_order(marked: list[tuple[int, Slot, Ttl]]) -> None:
    for (_, _, before), (_, slot, ttl) in pairwise(marked):
        if outlives(ttl, before):
            raise MarkersBroken(f"{slot.path}.cache_control.ttl: {_ORDER}")


def add_automatic(
    prompt: Prompt, slots: Sequence[Slot], given: Sequence[Breakpoint], policy: AutoCache
) -> list[Breakpoint]:
    """The client's breakpoints with those of the policy, in prompt order.

    `slots` are the prompt's segments. If the client set breakpoints, only the one behind the last
    turn is added, because a shorter TTL may not come before a longer one.
    """
    if policy.mode == "off" or len(given) >= MAX_BREAKPOINTS:
        return list(given)
    found = {point.segment: point for point in given}
    targets = _targets(prompt, slots, policy)
    if given:
        targets = targets[-1:] if policy.mode == "conversation" else []
    for segment in targets:
        found.setdefault(segment, Breakpoint(segment, policy.ttl))
    if _breaks_order(found):
        return list(given)
    return [found[segment] for segment in sorted(found)]


def _targets(prompt: Prompt, slots: Sequence[Slot], policy: AutoCache) -> list[int]:
    head = len(prompt.tools) + len(prompt.system)
    ends = [head - 1]
    if policy.mode == "conversation":
        ends += [_end_before_answer(prompt, head), len(slots) - 1]
    return [end for end in (find_target(slots[: end + 1]) for end in ends) if end is not None]


def _end_before_answer(prompt: Prompt, head: int) -> int:
    """The last segment before the last answer of the model, -1 without one."""
    end, found = head - 1, -1
    for message in prompt.messages:
        if message.role == "assistant":
            found = end
        end += len(message.parts)
    return found


def _breaks_order(found: dict[int, Breakpoint]) -> bool:
    ttls = [found[segment].ttl for segment in sorted(found)]
    return any(outlives(later, earlier) for earlier, later in pairwise(ttls))
