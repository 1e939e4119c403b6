"""Ways to place markers, and the breakpoints that each gives a turn. Pure.

A way says where by the request's own structure, as a client can follow it: behind the tools, behind
a system block, behind a message block, behind the prompt before the last answer, behind the last
block. The ways of a conversation are those of automatic caching (`prompt/plan.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import Ttl, outlives
from gateway.advice.observation import Mark, Observation
from gateway.structs.misses import Section

_HOUR_MS = 3_600_000
# The message blocks behind which a shared beginning of messages may end.
_SHARED_BLOCKS = 8
# A place is taken for the shared beginning where so many more tokens come again than at the head.
_DEEPER = 1.05


@dataclass(frozen=True, slots=True)
class Place:
    """Behind block `index` of a section, -1 for its last block."""

    section: Section
    index: int

    def prefix_in(self, turn: Observation) -> int:
        """The place among the turn's prefixes, -1 where the turn has no such block."""
        match self.section:
            case "tools":
                start = 0
                count = turn.num_tools
            case "system":
                start = turn.num_tools
                count = turn.num_system
            case "messages":
                start = turn.head
                count = turn.places[-1] + 1 - turn.head
        index = count - 1 if self.index < 0 else self.index
        if not 0 <= index < count:
            return -1
        return turn.carrier(turn.prefix_at(start + index))

    @property
    def path(self) -> str:
        """The path of the block, as errors name blocks; a section alone is its end."""
        return self.section if self.index < 0 else f"{self.section}.{self.index}"


@dataclass(frozen=True, slots=True)
class Placement:
    """`shared` is the end of what requests share, `talk` marks the conversation as it grows."""

    name: str
    shared: Place | None = None
    shared_ttl: Ttl | None = None
    talk_ttl: Ttl | None = None

    def marks(self, turn: Observation) -> list[Mark]:
        ttls: dict[int, Ttl] = {}
        if self.shared is not None and self.shared_ttl is not None:
            ttls[self.shared.prefix_in(turn)] = self.shared_ttl
        if self.talk_ttl is not None:
            for end in turn.ends:
                ttls.setdefault(end, self.talk_ttl)
        ttls.pop(-1, None)
        marks = list(ttls.items())
        if len(marks) < 2:
            return marks
        marks.sort()
        # A shared end may lie behind the answer's: the longer TTL has to come first.
        longest = marks[-1][1]
        for number in range(len(marks) - 1, -1, -1):
            if outlives(marks[number][1], longest):
                longest = marks[number][1]
            marks[number] = marks[number][0], longest
        return marks


def placements_for(turns: Sequence[Observation]) -> list[Placement]:
    """The ways that are worth a comparison for these turns, the simplest first."""
    head, deeper = shared_ends(turns)
    placements = [Placement("none")]
    for place in (head, deeper):
        if place is not None:
            placements += [Placement("shared_5m", place, "5m"), Placement("shared_1h", place, "1h")]
    if any(turn.answer >= 0 for turn in turns):
        placements += [
            Placement("conversation_5m", head, "5m", "5m"),
            Placement("conversation_1h", head, "1h", "1h"),
        ]
        if head is not None:
            placements.append(Placement("conversation_5m_shared_1h", head, "1h", "5m"))
    return placements


def shared_ends(turns: Sequence[Observation]) -> tuple[Place | None, Place | None]:
    """Where what requests share ends: within tools and system prompt, and in the messages if more
    comes again there. None where nothing comes again within an hour.
    """
    # For each place the tokens of prefixes that came again there within an hour.
    counts: Counter[tuple[Section, int]] = Counter()
    seen: dict[bytes, int] = {}
    for turn in turns:
        now = turn.at_ms
        start = turn.head
        tools = turn.num_tools
        # What follows the first message is this conversation's own, and the end of the request is
        # no place to share.
        end = len(turn.places) - 1
        if turn.answer >= 0:
            begun = zip(turn.places, turn.kinds, strict=True)
            later = (n for n, (at, kind) in enumerate(begun) if at > start and kind.isupper())
            end = min(next(later, end), end)
        for place in range(max(tools - 1, 0), end):
            segment = turn.places[place]
            digest = turn.digests[place]
            if segment >= start + _SHARED_BLOCKS:
                break
            before = seen.get(digest)
            seen[digest] = now
            if before is None or now - before > _HOUR_MS:
                continue
            if segment >= start:
                counts["messages", segment - start] += turn.tokens[place]
            elif segment >= tools:
                counts["system", segment - tools] += turn.tokens[place]
            elif segment == tools - 1:
                counts["tools", -1] += turn.tokens[place]
    again = {Place(section, index): tokens for (section, index), tokens in counts.items()}
    heads = {place: n for place, n in again.items() if place.section != "messages"}
    head = max(heads, key=lambda place: heads[place], default=None)
    least = _DEEPER * heads[head] if head is not None else 0
    deeper = {p: n for p, n in again.items() if p.section == "messages" and n > least}
    shared = max(deeper, key=lambda place: deeper[place], default=None)
    # The end of the system prompt, where the place is that in every turn.
    if head is not None and head.section == "system":
        if all(turn.num_system == head.index + 1 for turn in turns):
            head = Place("system", -1)
    return head, shared
