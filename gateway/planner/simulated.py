"""A request of a simulated engine, and the size and speed of one. No engine, no clock."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from engine.cache.entries import ARRIVAL_GRACE_SECONDS
from engine.cache.lookup import Segment
from engine.cache.prefix_cache import CacheQuery
from engine.protocol import Breakpoint, HeldName, Ttl
from gateway.prompt.names import step_at

SCOPE = "simulated"
PREFILL_SECONDS, DECODE_SECONDS = 50e-6, 20e-3
"""For each token."""
CHARACTERS_PER_TOKEN = 4


@dataclass(slots=True)
class SimulatedRequest:
    """`units` are ids of consecutive pieces of the prompt: equal ids, equal content and history.

    `ends` are the segment ends in units. `marks` index `ends`. A request that `is_marked` is
    promised its reuse, even where its marks are left out to see what LRU does.
    """

    at: float
    kind: str
    units: list[int]
    unit_tokens: int
    tokens: int
    output_tokens: int
    ends: list[int]
    marks: list[int] = field(default_factory=list)
    ttl: Ttl = "5m"
    is_marked: bool = False
    next: "SimulatedRequest | None" = None
    scope: str = SCOPE
    ttls: list[Ttl] | None = None
    """Of each of `marks`, where they differ."""
    answer: list[int] = field(default_factory=list)
    """Units that the answer takes while it is written."""
    behind: list[int] = field(default_factory=list)
    """Units of the prompt behind the last of `units`, which are nobody else's. There is one at
    least in a template, so that all before it can be read."""
    query: CacheQuery | None = None
    """How a cache sees the prompt, once one was asked."""

    def tokens_of(self, start: int, end: int) -> int:
        """How many tokens the units from `start` to `end` have; the last one may be short."""
        return min(end * self.unit_tokens, self.tokens) - min(start * self.unit_tokens, self.tokens)

    def names(self) -> list[HeldName]:
        """A prefix's name is its last unit's id, since that stands for all before it too."""
        depths = sorted({*self._name_depths(), *self.ends})
        return [HeldName(f"{self.units[depth - 1]:016x}", depth) for depth in depths if depth]

    def _name_depths(self) -> Iterator[int]:
        """Inside texts, in units: as `gateway.prompt.names` sets them, and at whole units."""
        unit = self.unit_tokens * CHARACTERS_PER_TOKEN
        depth = 0
        while (depth := depth + max(step_at(depth * unit) // unit, 1)) < len(self.units):
            yield depth

    def segments(self) -> list[Segment]:
        return [Segment("text", end, number) for number, end in enumerate(self.ends)]

    def breakpoints(self) -> list[Breakpoint]:
        ttls = self.ttls if self.ttls is not None else [self.ttl] * len(self.marks)
        return [Breakpoint(mark, ttl) for mark, ttl in zip(self.marks, ttls, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """Seconds of the time model: `prefill`, `host` and `disk` for each token, `decode` a step.

    `host` and `disk` are the ways back to the device. A step computes at most `step_tokens` of
    prompts and one token of each answer, and takes a decode longer if there are answers;
    `step_tokens` 0: prompts and answers do not hold each other up. Before and after an engine's
    work a first token takes `overhead` seconds.
    """

    prefill: float = PREFILL_SECONDS
    decode: float = DECODE_SECONDS
    host: float = 0.0
    disk: float = 0.0
    step_tokens: int = 0
    overhead: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacities:
    """Tokens of each tier of one engine, and what bounds leases and running requests.

    A block has `block_units` units. Prefixes below `min_cache_tokens` are not cached.
    """

    device: int
    host: int = 0
    disk: int = 0
    lease_share: float = 0.5
    scope_lease_share: float = 1.0
    max_running: int | None = None
    ttl_scale: float = 1.0
    grace_seconds: float = ARRIVAL_GRACE_SECONDS
    block_units: int = 1
    min_cache_tokens: int = 1
