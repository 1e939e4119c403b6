"""Ways to place markers, and the breakpoints that each gives a turn. Pure.

A way names places of the request's own structure, so that a client can follow it: behind the tools,
behind a system block, behind a message block, behind the prompt before the last answer, behind the
last block. The ways of a conversation are those of automatic caching (`prompt/plan.py`).
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.protocol import Ttl, outlives
from gateway.advice.observation import Mark, Observation
from gateway.structs.misses import Section

_HOUR_MS = 3_600_000
# A shared beginning ends at the latest behind this many message blocks.
_SHARED_BLOCKS = 8
# A place in the messages ends the shared beginning if more than this many times the head's tokens
# come again there.
_DEEPER = 1.05


@dataclass(frozen=True, slots=True)
class Place:
    """Behind block `index` of a section, -1 for its last block."""

    section: Section
    index: int

    def prefix_in(self, turn: Observation) -> int:
        """The number of the prefix that ends here, -1 where the turn has no such block."""
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
        """The path of the block, as errors name blocks. A section alone means its end."""
        return self.section if self.index < 0 else f"{self.section}.{self.index}"


@dataclass(frozen=True, slots=True)
class Placement:
    """One way to place markers."""

    name: str
    # The end of what requests share.
    shared: Place | None = None
    # The TTL of the marker at that end; None for no marker there.
    shared_ttl: Ttl | None = None
    # The TTL of the markers along the conversation as it grows; None for none.
    talk_ttl: Ttl | None = None

    def marks(self, turn: Observation) -> list[Mark]:
        """The breakpoints of a turn, in order of the prompt. Longer TTLs come first."""
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
        # The shared end may lie behind the marker before the answer. Longer TTLs must come first.
        # So a breakpoint before one with a longer TTL gets that TTL.
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
    """Two ends of what requests share: one within tools and system prompt, and one in the messages
    if more tokens come again there. None for an end where nothing comes again within an hour.
    """
    # For each section and index: the tokens of prefixes that came again there within an hour.
    counts: Counter[tuple[Section, int]] = Counter()
    # The time of the latest turn with each prefix.
    seen_ms: dict[bytes, int] = {}
    for turn in turns:
        now = turn.at_ms
        start = turn.head
        tools = turn.num_tools
        # What follows the first message belongs to this conversation alone. The end of the request
        # is no place to share.
        end = len(turn.places) - 1
        if turn.answer >= 0:
            blocks = zip(turn.places, turn.kinds, strict=True)
            # An upper-case letter begins a message.
            message_begins = (
                place
                for place, (segment, kind) in enumerate(blocks)
                if segment > start and kind.isupper()
            )
            end = min(next(message_begins, end), end)
        for place in range(max(tools - 1, 0), end):
            segment = turn.places[place]
            digest = turn.digests[place]
            if segment >= start + _SHARED_BLOCKS:
                break
            before_ms = seen_ms.get(digest)
            seen_ms[digest] = now
            if before_ms is None or now - before_ms > _HOUR_MS:
                continue
            if segment >= start:
                counts["messages", segment - start] += turn.tokens[place]
            elif segment >= tools:
                counts["system", segment - tools] += turn.tokens[place]
            elif segment == tools - 1:
                counts["tools", -1] += turn.tokens[place]
    shared = {Place(section, index): tokens for (section, index), tokens in counts.items()}
    heads = {place: tokens for place, tokens in shared.items() if place.section != "messages"}
    head = max(heads, key=lambda place: heads[place], default=None)
    least = _DEEPER * heads[head] if head is not None else 0
    in_messages = {
        place: tokens
        for place, tokens in shared.items()
        if place.section == "messages" and tokens > least
    }
    deeper = max(in_messages, key=lambda place: in_messages[place], default=None)
    # If the place is the end of the system prompt in every turn, it is named as that.
    if head is not None and head.section == "system":
        if all(turn.num_system == head.index + 1 for turn in turns):
            head = Place("system", -1)
    return head, deeper
