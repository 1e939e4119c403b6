"""Where the client wants a prefix held: explicit markers, the automatic one, and their rules.

Pure: slots in, breakpoints out. Broken rules are reported in the order count, explicit TTL order,
automatic against explicit, automatic TTL order.
"""

from collections.abc import Sequence
from itertools import pairwise

from msgspec.structs import replace

from engine.protocol import MAX_BREAKPOINTS, Breakpoint, Ttl, outlives
from gateway.base.errors import InvalidRequest
from gateway.prompt.layout import Slot

_ORDER = (
    "a ttl='1h' cache_control block must not come after a ttl='5m' cache_control block. Note that"
    " blocks are processed in the following order: `tools`, `system`, `messages`."
)


def find_breakpoints(slots: Sequence[Slot], automatic: Ttl | None = None) -> list[Breakpoint]:
    """Return the breakpoints in prompt order, or raise for the first broken rule."""
    found = sum(slot.num_markers for slot in slots) + (automatic is not None)
    if found > MAX_BREAKPOINTS:
        raise InvalidRequest(
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
        raise InvalidRequest(f"cache_control: {_ORDER}")
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
            raise InvalidRequest(f"{slot.path}.cache_control.ttl: {_ORDER}")
