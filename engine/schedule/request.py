"""A request in the engine, its sequences, one per choice, and the pieces that steps compute."""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from engine.cache.ids import TokenId
from engine.cache.prefix_cache import CacheQuery, CacheResult, Lookup, PrefixCache
from engine.cache.table import BlockCopy, BlockTable
from engine.cache.worth import AnswerEnd
from engine.protocol import FinishReason, Frame, GenerateRequest, Image, InputUsage, UnheldTool
from engine.schedule.output import LogProbs, OutputParser, Spelled, unspelled
from engine.schedule.runner import SampleParams, Work

NEVER = -1e9
"""The bias of a token that is drawn only if no other token is allowed. It is finite, because a
grammar may allow this token alone."""


class Ranges:
    """The computed positions of a prompt, each counted once, as disjoint ranges in order."""

    __slots__ = ("_ranges", "total")

    def __init__(self) -> None:
        self._ranges: list[tuple[int, int]] = []
        self.total = 0

    def add(self, start: int, end: int) -> None:
        """Positions start, start + 1, … end - 1 were computed, for the first time or again."""
        ranges = self._ranges
        first = bisect_left(ranges, start, key=lambda span: span[1])
        last = bisect_right(ranges, end, key=lambda span: span[0])
        before = ranges[first:last]
        if before:
            start = min(start, before[0][0])
            end = max(end, before[-1][1])
        ranges[first:last] = [(start, end)]
        self.total += end - start - sum(stop - begin for begin, stop in before)


class Drafter(Protocol):
    """Proposes tokens of one choice. It must be fast: the engine's thread calls it once a step."""

    def propose(self, tokens: Sequence[TokenId]) -> list[TokenId]:
        """Tokens that may follow `tokens`. `tokens` begins with the tokens of the previous call."""
        ...

    def verified(self, num_proposed: int, num_accepted: int) -> None:
        """The first `num_accepted` of the proposed tokens were drawn."""
        ...


Emit = Callable[[Frame], None]
"""Takes a frame to its reader. It is called on the engine's thread and must not block."""


@dataclass(slots=True, eq=False)
class SequenceState:
    """One choice.

    The prompt of a sequence may be made of other prompts, which it computes first (`is_preparing`).
    A subclass stands for such a sequence. It overrides many of the properties below.
    """

    request: "RequestState"
    choice: int
    # The blocks that have the keys and values of a prefix of `tokens`.
    table: BlockTable
    parser: OutputParser
    sample: SampleParams
    # The tokens of the prompt, and behind them the sampled ones.
    tokens: list[TokenId]
    finish: FinishReason | None = None
    # When the last token came, in seconds of the engine's clock; None before the first.
    last_output_at: float | None = None
    # The numbers that are added to the logits, by token: the request's biases, the penalties for
    # sampled tokens, and NEVER for tokens that would end it before `min_tokens`. None: there is
    # nothing to add.
    bias: dict[TokenId, float] | None = None
    # The tokens that it has sampled. They are noted only if there is a `bias`.
    sampled: set[TokenId] = field(default_factory=set)
    # The `seen` of its `Work`. None: there is no repetition penalty.
    seen: bytearray | None = None
    # None unless the request wants them.
    logprobs: LogProbs | None = None
    # Tokens that the drafter proposes next.
    draft: list[TokenId] = field(default_factory=list)
    # None without speculation.
    drafter: Drafter | None = None
    # The rest of its work between two steps, in bounded parts. None: it has not begun.
    parts: Iterator[int] | None = None

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
            tokens = self.request.prompt_tokens
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

    def begin(self, cache: PrefixCache) -> list[BlockCopy]:
        """Fill its empty table with what is in memory, and allocate the other blocks.

        Return the copies to make before anything is written. Raises NoFreeBlocks, with nothing
        changed.
        """
        request = self.request
        if not self.is_new:
            return cache.resume(request.query, self.tokens, self.table)
        assert request.lookup is not None
        request.lookup.raced = request.raced
        return cache.begin(request.query, request.lookup, self.table)

    @property
    def answer_end(self) -> AnswerEnd | None:
        """How its answer ended, in the classes of blocks' worth. None: it has not ended."""
        match self.finish:
            case None:
                return None
            case "tool_use":
                return "tool_use"
            case "stop" | "stop_sequence":
                return "end_turn"
            case _:
                return "other"

    def release(self) -> None:
        """Give all blocks back."""
        self.table.release(self.answer_end)

    def work(self, chunk: "PrefillChunk") -> Work:
        """What the runner is to compute for a chunk."""
        request = self.request
        samples = chunk.is_last and request.request.sampling.max_tokens != 0
        token_ids = self.tokens[chunk.start : chunk.start + chunk.count]
        return Work(
            token_ids=[*token_ids, *chunk.draft] if chunk.draft else token_ids,
            start=chunk.start,
            block_table=self.table.block_ids,
            sample=self.sample if samples else None,
            allowed=self.parser.allowed if samples else None,
            bias=self.bias if samples else None,
            seen=self.seen if samples else None,
            probs=self.logprobs.probs if samples and self.logprobs else None,
            draft=chunk.draft,
            state=self.table.state.move() if self.table.state else None,
            adapter=request.query.adapter,
            cut=request.query.cut,
        )

    def position_of(self, slot: int) -> int:
        """The position in the prompt of the token at a slot."""
        return slot + self.request.query.cut

    @property
    def boundaries(self) -> Sequence[int]:
        """The slots at which its prefill chunks must end, in order."""
        return self.request.boundaries

    @property
    def tables(self) -> Sequence[BlockTable]:
        """The tables that content is brought to."""
        return [self.table]

    @property
    def num_computed(self) -> int:
        """How many slots of its prompt are in memory."""
        return self.table.num_tokens

    @property
    def is_whole(self) -> bool:
        """Whether it needs all the blocks that it was admitted with.

        If so, it starts again when a block is lost. Otherwise the lost block is computed.
        """
        return False

    # A sequence whose prompt is made of other prompts overrides these.

    @property
    def is_preparing(self) -> bool:
        """Whether it computes one of the prompts now that its own is made of."""
        return False

    @property
    def is_part_due(self) -> bool:
        """Whether it waits for a part of work that is done between two steps."""
        return False

    def new_parts(self) -> Iterator[int]:
        """The work, in bounded parts. Each yields how many tokens of prefill take as long."""
        return iter(())

    def go_on(self, cache: PrefixCache) -> list[BlockCopy]:
        """The work is done: begin the next prompt, or go on with its own.

        Return the copies to make. Raises NoFreeBlocks, and may be called again then.
        """
        return []

    @property
    def scope(self) -> str:
        return self.request.query.scope

    @property
    def ending(self) -> "Sequence[SequenceState]":
        """The choices that end with this one.

        These are all choices of the request if its response has not begun.
        """
        return [self] if self.request.started_at is not None else self.request.sequences

    @property
    def is_batch(self) -> bool:
        return self.request.request.service_class == "batch"

    @property
    def can_sample(self) -> bool:
        """Whether the allowed next tokens are known."""
        return self.parser.constraint is None or self.parser.constraint.is_ready

    @property
    def is_new(self) -> bool:
        """Whether its response has not begun, so that its read is not reported yet."""
        return self.request.leader is self and self.request.started_at is None

    @property
    def lacks_look_up(self) -> bool:
        return self.is_new and self.request.lookup is None

    @property
    def num_output(self) -> int:
        return len(self.tokens) - len(self.request.query.tokens)

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
class ImagePrompt:
    """A prompt's tokens, with one place for each image, and its images in order."""

    token_ids: Sequence[TokenId]
    images: Sequence[Image]


@dataclass(slots=True, eq=False)
class RequestState:
    """One turn. Moments are in seconds of the engine's clock."""

    request: GenerateRequest
    query: CacheQuery
    # One for each choice.
    parsers: Sequence[OutputParser]
    emit: Emit
    submitted_at: float
    # Gives the bytes of a token.
    spelled: Callable[[TokenId], Spelled] = unspelled
    unheld: Sequence[UnheldTool] = ()
    folded: Sequence[int] = ()
    inexact: Sequence[int] = ()
    # The prompt with its images. None: it has no images.
    image_prompt: ImagePrompt | None = None
    # None while nothing is pinned for it: before its look-up, and after preemption.
    lookup: Lookup | None = None
    # The sequence that it waits for.
    twin: Twin | None = None
    # The largest number of tokens that it waited for a twin to compute.
    raced: int = 0
    # How many later requests were admitted before it, because it did not fit or they reused more.
    num_overtaken: int = 0
    # How many tokens were computed by requests that passed it because they reused more
    # (`reuse_order.py`).
    overtaken_tokens: int = 0
    # How many free blocks it needed when it did not fit.
    num_needed: int = 0
    # One for each choice.
    sequences: list[SequenceState] = field(default_factory=list)
    # The slots at which its prefill chunks must end, in order.
    boundaries: list[int] = field(default_factory=list)
    # When it was admitted.
    began_at: float | None = None
    # When its response began.
    started_at: float | None = None
    # When the last of its blocks arrived from a lower tier.
    brought_at: float | None = None
    usage: InputUsage | None = None
    # The positions of its prompt that went through the model.
    computed: Ranges = field(default_factory=Ranges)
    is_forked: bool = False
    num_finished: int = 0
    thinking_tokens: int = 0
    output_tokens: int = 0

    def look_up(self, cache: PrefixCache) -> None:
        """Find and pin what it may read."""
        self.lookup = cache.look_up(self.query)

    @property
    def has_pinned_blocks(self) -> bool:
        """Whether a look-up's blocks are pinned for it."""
        return self.lookup is not None and bool(self.lookup.pinned)

    def let_go(self, cache: PrefixCache) -> None:
        """Release what is pinned for it, at its end."""
        if self.lookup is not None:
            cache.let_go(self.lookup)

    def give_up(self, cache: PrefixCache) -> None:
        """Release what is pinned for it, to be looked up again. Refreshes stay."""
        if self.lookup is not None:
            cache.give_up(self.lookup)
            self.lookup = None

    def take_back(self, cache: PrefixCache) -> None:
        """Its response never began: take the look-up's refreshes back."""
        if self.lookup is not None:
            cache.take_back(self.lookup)

    def write(self, cache: PrefixCache, sequence: SequenceState, now: float) -> CacheResult:
        """Write its entries: its prompt is computed, by this sequence."""
        assert self.lookup is not None
        return cache.write(self.query, self.lookup, sequence.table, now)

    def new_sequence(
        self, choice: int, table: BlockTable, parser: OutputParser, sample: SampleParams
    ) -> SequenceState:
        return SequenceState(self, choice, table, parser, sample, list(self.query.tokens))

    @property
    def prompt_tokens(self) -> Sequence[TokenId]:
        """All tokens of the prompt as it was asked."""
        return self.query.tokens

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def unfinished(self) -> "list[SequenceState]":
        return [sequence for sequence in self.sequences if sequence.finish is None]

    @property
    def leader(self) -> SequenceState:
        return self.sequences[0]


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Tokens of a sequence that a step computes.

    A step may have several chunks of one sequence, with content in memory between them.
    """

    sequence: SequenceState
    # The slot of the first token.
    start: int
    count: int
    # Whether the sequence's pending tokens end with it.
    is_last: bool
    # Proposed tokens, which are computed behind the others.
    draft: Sequence[TokenId] = ()

    @property
    def is_decode(self) -> bool:
        """Whether it is a single token that samples.

        A chunk of a prompt's last token alone counts too, because it costs the same.
        """
        return self.count == 1 and self.is_last


def prefill_chunks(sequence: SequenceState, budget: int) -> Iterator[PrefillChunk]:
    """Chunks up to the budget, never across a boundary, so that equal prompts get equal chunks."""
    left = budget
    if left <= 0:
        return
    boundaries = sequence.boundaries
    for start, stop in sequence.table.gaps(sequence.table.reachable(len(sequence.tokens))):
        if left < budget and start in boundaries:
            return  # other choices may begin here and share the block
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
    boundaries = marked_ends(request.query)
    if request.request.sampling.num_choices > 1:
        boundaries.add(len(request.query.tokens) - 1)
    state = request.leader.table.state
    if state is not None:
        boundaries.update(state.plan)
    return sorted(boundaries)


def marked_ends(query: CacheQuery) -> set[int]:
    """The slots at which a prompt's breakpoints stand."""
    ends = {query.segments[point.segment].end for point in query.breakpoints}
    return {end for end in ends if end}
