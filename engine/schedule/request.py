"""A request in the engine, its sequences, one per choice, and the pieces that steps compute."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.cache.approximate import Placing, with_sibling
from engine.cache.ids import TokenId
from engine.cache.prefix_cache import CacheQuery, Found, PrefixCache
from engine.cache.table import BlockTable
from engine.protocol import FinishReason, Frame, GenerateRequest, Image, InputUsage, UnheldTool
from engine.schedule.output import LogProbs, OutputParser, Spelled, unspelled
from engine.schedule.runner import SampleParams

NEVER = -1e9
"""The bias of a token that is not to be drawn while any other may be: infinity would leave none
where a grammar allows this one alone."""


class Ranges:
    """The computed positions of a prompt, each counted once, as disjoint ranges in order."""

    __slots__ = ("_ranges", "total")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.total = 0

    def add(self, start: int, end: int) -> None:
        """Positions start, start + 1, … end - 1 were computed, for the first time or again."""
        ranges = self._ranges
        first = bisect_left(ranges, start, key=lambda one: one[1])
        last = bisect_right(ranges, end, key=lambda one: one[0])
        before = ranges[first:last]
        if before:
            start = min(start, before[0][0])
            end = max(end, before[-1][1])
        ranges[first:last] = [(start, end)]
        self.total += end - start - sum(stop - begin for begin, stop in before)


class Drafter(Protocol):
    """Proposes tokens of one choice. It must be fast: the engine's thread calls it once a step."""

    def propose(self, tokens: Sequence[TokenId]) -> list[TokenId]:
        """Tokens that may follow these, which begin with the tokens of the call before."""
        ...

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """The first `num_accepted` of the proposed tokens were drawn."""
        ...


Emit = Callable[[Frame], None]
"""Takes a frame to its reader. It is called on the engine's thread and must not block."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice.

    `tokens` are the prompt's and the sampled ones; the table has the KV of a prefix of them. `bias`
    is added to the logits by token. It has the request's biases and the penalties for the tokens in
    `sampled`, and rules out `ends` before `min_tokens`; None without any of them. `seen` is
    `Work`'s, None without a repetition penalty. `last_output_at` is when the last token came, in
    seconds of the engine's clock; None before the first. `logprobs` is there if the request wants
    them. `draft` are tokens that the `drafter` proposes next, which is there with speculation.

    Of an approximate prompt the exact prompts that are copied are computed first, where that is not
    in memory: `tokens` and the table are those of that `origin` then, and the choice's are its
    `own`. The own blocks get what is copied of the `placings` by `copying`, a part at a time.
    """

    request: "RequestState"
    choice: int
    table: BlockTable
    parser: OutputParser
    sample: SampleParams
    tokens: list[TokenId]
    finish: FinishReason | None = None
    last_output_at: float | None = None
    bias: dict[TokenId, float] | None = None
    sampled: set[TokenId] = field(default_factory=set)
    seen: bytearray | None = None
    logprobs: LogProbs | None = None
    draft: list[TokenId] = field(default_factory=list)
    drafter: Drafter | None = None
    origin: CacheQuery | None = None
    own: tuple[list[TokenId], BlockTable] | None = None
    placings: list[Placing] = field(default_factory=list)
    copying: Iterator[int] | None = None

    def __post_init__(self) -> None:
        num_top = self.request.request.sampling.logprobs
        if num_top is not None:
            self.logprobs = LogProbs(num_top, self.request.spelled)
        sample = self.sample
        is_early = bool(sample.min_tokens and self.parser.end_token_ids)
        if is_early or sample.presence_penalty or sample.frequency_penalty or sample.bias:
            self.bias = dict(sample.bias)
        if self.bias is not None and is_early:
            self.bias |= dict.fromkeys(self.parser.end_token_ids, NEVER)
        if sample.repetition_penalty != 1:
            tokens = self.request.query.real or self.tokens
            self.seen = bytearray(max(tokens, default=-1) + 1)
            for token in tokens:
                self.seen[token] = 1

    def append(self, token: TokenId) -> None:
        """Add a sampled token, and change the logits for the next ones."""
        if self.bias is not None:
            if self.num_output + 1 == self.sample.min_tokens:
                ends = self.parser.end_token_ids
                self.bias |= {end: self.sample.bias.get(end, 0.0) for end in ends}
            is_new = token not in self.sampled
            lowered = self.sample.frequency_penalty + self.sample.presence_penalty * is_new
            self.bias[token] = self.bias.get(token, 0.0) - lowered
            self.sampled.add(token)
        if self.seen is not None:
            self.seen.extend(bytes(max(token + 1 - len(self.seen), 0)))
            self.seen[token] = 1
        self.tokens.append(token)
        self.draft = []

    def go_back(self) -> None:
        """Go on with the choice's own."""
        if self.own is not None:
            self.tokens, self.table = self.own
        self.own = self.origin = None

    def let_placings_go(self) -> None:
        for placing in self.placings:
            if placing.table is not None:
                placing.table.release()
        self.placings = []

    def release(self) -> None:
        """Give all blocks back."""
        self.table.release()
        self.go_back()
        self.table.release()
        self.let_placings_go()
        self.copying = None

    @property
    def is_exact_part(self) -> bool:
        """Whether it computes an exact prompt that is not its own."""
        return self.own is not None

    @property
    def placing(self) -> Placing | None:
        """What it computes or copies."""
        return next((one for one in self.placings if one.table is self.table), None)

    @property
    def is_to_copy(self) -> bool:
        """Whether that is computed, and is copied now."""
        return self.own is not None and not (self.num_pending or self.own[1].incoming)

    @property
    def tables(self) -> list[BlockTable]:
        """Those that content is brought to. Its own comes first: others are copied behind it."""
        return [self.table] if self.own is None else [self.own[1], self.table]

    @property
    def num_computed(self) -> int:
        """The tokens, or slots of a compressed prompt, that are there."""
        return 0 if self.is_exact_part else self.table.num_tokens

    @property
    def scope(self) -> str:
        return self.request.query.scope

    @property
    def ending(self) -> "Sequence[SequenceState]":
        """The choices that end with this one: all of a request whose response has not begun."""
        return [self] if self.request.started_at is not None else self.request.sequences

    @property
    def is_batch(self) -> bool:
        return self.request.request.service_class == "batch"

    @property
    def can_sample(self) -> bool:
        """Whether the allowed next tokens are known."""
        return self.parser.mask is None or self.parser.mask.is_ready

    @property
    def is_new(self) -> bool:
        """Whether its response has not begun, so that its read is not reported yet."""
        return self.request.leader is self and self.request.started_at is None

    @property
    def lacks_look_up(self) -> bool:
        return self.is_new and self.request.found is None

    @property
    def num_output(self) -> int:
        own = self.tokens if self.own is None else self.own[0]
        return len(own) - len(self.request.query.tokens)

    @property
    def num_pending(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding.

        0 if the last token was sampled and its parser has not taken it yet.
        """
        return len(self.tokens) - self.table.num_tokens


class Twin(NamedTuple):
    """A running sequence that computes the first `tokens` tokens of a waiting one."""

    sequence: SequenceState
    tokens: int


@dataclass(frozen=True, slots=True)
class Shown:
    """A prompt's tokens with one place for each of its images, and those, in order."""

    token_ids: Sequence[TokenId]
    images: Sequence[Image]


@dataclass(slots=True, eq=False)
class RequestState:
    """One turn. `found` is None while nothing is held for it (before look-up, after preemption).

    `twin` is the sequence that it waits for, `raced` the most tokens of its prompt that it waited
    for. `spelled` says what a token stands for. `computed` are the positions of its prompt that
    went through the model. `num_overtaken` later requests were admitted before it, because it did
    not fit and needed `num_needed` free blocks then, or for what they reused: those computed
    `overtaken_tokens` (`waiting.py`). With images the prompt is also there as it is `shown`.
    """

    request: GenerateRequest
    query: CacheQuery
    parsers: Sequence[OutputParser]
    emit: Emit
    submitted_at: float
    spelled: Callable[[TokenId], Spelled] = unspelled
    unheld: Sequence[UnheldTool] = ()
    folded: Sequence[int] = ()
    inexact: Sequence[int] = ()
    shown: Shown | None = None
    found: Found | None = None
    twin: Twin | None = None
    raced: int = 0
    num_overtaken: int = 0
    overtaken_tokens: int = 0
    num_needed: int = 0
    sequences: list[SequenceState] = field(default_factory=list)
    boundaries: list[int] = field(default_factory=list)
    began_at: float | None = None
    started_at: float | None = None
    brought_at: float | None = None
    usage: InputUsage | None = None
    computed: Ranges = field(default_factory=Ranges)
    is_forked: bool = False
    num_finished: int = 0
    thinking_tokens: int = 0
    output_tokens: int = 0

    def look_up(self, cache: PrefixCache) -> None:
        """Find and hold what it may read. One that may read a sibling's entries is exact if there
        is none."""
        if self.query.asked is not None:
            before = self.query
            self.query = with_sibling(self.query, cache)
            if self.query.digests.adapter != before.digests.adapter:
                self.twin = None
                self.raced = 0
            for leader in self.sequences[:1]:
                leader.table = cache.new_table(self.query)
        self.found = cache.look_up(self.query)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def unfinished(self) -> "list[SequenceState]":
        return [one for one in self.sequences if one.finish is None]

    @property
    def leader(self) -> SequenceState:
        return self.sequences[0]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """`count` tokens of a sequence from `start` on; `is_last` when nothing is pending after them.

    A step may have several chunks of one sequence, with content in memory between them. `draft` are
    tokens that may follow, to be computed too.
    """

    sequence: SequenceState
    start: int
    count: int
    is_last: bool
    draft: Sequence[TokenId] = ()

    @property
    def is_decode(self) -> bool:
        """Whether it is one token that samples; a prompt's last token alone costs the same."""
        return self.count == 1 and self.is_last


def prefill_chunks(sequence: SequenceState, budget: int) -> Iterator[PrefillChunk]:
    """Chunks up to the budget, never across a boundary, so that equal prompts get equal chunks."""
    if (left := budget) <= 0:
        return
    boundaries = sequence.request.boundaries
    if sequence.origin is not None:
        boundaries = sorted(_marked_ends(sequence.origin))
    for start, stop in sequence.table.gaps(sequence.table.reachable(len(sequence.tokens))):
        if left < budget and start in boundaries:
            return  # other choices may begin here, and share the block
        end = min(start + left, stop)
        for boundary in boundaries:
            if start < boundary < end:
                end = boundary
                break
        yield PrefillChunk(sequence, start, end - start, is_last=end == len(sequence.tokens))
        left -= end - start
        if end < stop or not left:
            return


def new_boundaries(request: RequestState) -> list[int]:
    """The positions at which prefill chunks must end.

    One is at each breakpoint, so that the text behind a cached prefix is computed in the same
    chunks as without it (bitwise equal results). One is before the last token if several choices
    start there. A recurrent state is kept at some of them, and at no other place.
    """
    boundaries = _marked_ends(request.query)
    if request.request.sampling.num_choices > 1:
        boundaries.add(len(request.query.tokens) - 1)
    if (state := request.leader.table.state) is not None:
        boundaries.update(state.plan)
    return sorted(boundaries)


def _marked_ends(query: CacheQuery) -> set[int]:
    ends = {query.segments[point.segment].end for point in query.breakpoints}
    return {end for end in ends if end}
