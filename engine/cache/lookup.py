"""Which entry a breakpoint may read, and how a prompt's tokens are billed.

The rules are those of the public prompt-caching contract ("Lookback window", "Mixed TTL"). Where
the contract is silent, PROTOCOL.md decides. Pure: entries are asked for through a callable.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from engine.cache.block import Entry
from engine.protocol import (
    WRITE_FIELDS,
    Breakpoint,
    InputUsage,
    SegmentKind,
    Ttl,
    is_one_position,
    split_writes,
)

WINDOW = 20
"""The number of positions that one breakpoint looks at, its own included."""


@dataclass(frozen=True, slots=True)
class Segment:
    """One segment's place in the rendered prompt."""

    kind: SegmentKind
    # In tokens; None: it has no boundary.
    end: int | None
    # The number of its message; None: a tool or a block of the system prompt.
    turn: int | None = None


@dataclass(frozen=True, slots=True)
class Mark:
    """An eligible breakpoint."""

    segment: int
    # The end of its prefix.
    tokens: int
    ttl: Ttl
    # A lifetime of its own, in place of the TTL's.
    seconds: float | None = None
    # Whether a lease is asked for.
    hold: bool = True


def eligible(
    segments: Sequence[Segment], breakpoints: Sequence[Breakpoint], min_cache_tokens: int
) -> list[Mark]:
    """The breakpoints that have a boundary at or above the minimum, in order."""
    marks = []
    for point in sorted(breakpoints, key=lambda point: point.segment):
        end = segments[point.segment].end
        if end is not None and end >= min_cache_tokens:
            marks.append(Mark(point.segment, end, point.ttl, point.seconds, point.hold))
    return marks


def asks_for(marks: Iterable[Mark], tokens: int) -> bool:
    """Whether a lease is asked for on an entry of so many tokens.

    It is if the entry lies within the prefix of a mark that asks for a lease.
    """
    return any(mark.hold and tokens <= mark.tokens for mark in marks)


def window(segments: Sequence[Segment], start: int) -> Iterator[int]:
    """The segments whose entries a breakpoint at `start` may read, nearest first."""
    position = 1
    for index in range(start, -1, -1):
        segment = segments[index]
        following = segments[min(index + 1, start)]
        is_run = is_one_position(
            segment.kind, following.kind, is_same_turn=segment.turn == following.turn
        )
        if index < start and not is_run:
            position += 1
        if position > WINDOW:
            return
        yield index


def longest_hit(
    segments: Sequence[Segment],
    marks: Sequence[Mark],
    find: Callable[[int], Entry | None],
    lookback_to: int | None = None,
) -> Entry | None:
    """The longest entry that any mark finds.

    Each mark stops at its first one. `find` takes tokens. With `lookback_to` the last mark goes
    back to that segment, past all the others.
    """
    best: Entry | None = None
    for mark in marks if lookback_to is None else marks[-1:]:
        if lookback_to is None:
            walk = window(segments, mark.segment)
        else:
            walk = iter(range(mark.segment, lookback_to - 1, -1))
        for index in walk:
            end = segments[index].end
            entry = find(end) if end else None
            if entry is not None:
                if best is None or entry.tokens > best.tokens:
                    best = entry
                break
    return best


def bill(marks: Sequence[Mark], prompt_tokens: int, read: int, reused: int) -> InputUsage:
    """Split the prompt by class: what was read, the writes with the longest TTL first, then input.

    `read` is the longest hit. `reused` is all that came from memory, with or without an entry, at
    least `read`.
    """
    writes = split_writes(((mark.tokens, mark.ttl) for mark in marks), read)
    return InputUsage(
        input_tokens=prompt_tokens - read - sum(writes.values()),
        cache_read_tokens=read,
        automatic_tokens=reused - read,
        computed_tokens=prompt_tokens - reused,
        **{WRITE_FIELDS[ttl]: tokens for ttl, tokens in writes.items()},
    )
