"""An engine without threads, sockets or a model: real cache, scheduler and accounting, fake runner.

The fake runner has a KV memory and answers with a checksum of what it *reads through the block
table*: a wrong block, a missed copy or a stale slot changes the tokens. `expected` says what a
request must answer however it was scheduled.
"""

import random
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from hashlib import blake2b
from itertools import accumulate
from typing import Any
from zlib import crc32

import msgspec

from engine.approximate.copying import Blend, Move
from engine.approximate.kinds import Compression, Sibling
from engine.approximate.prompt import (
    ApproximatePrompt,
    DocumentPlace,
    compressed,
    with_documents,
    with_sibling_mark,
)
from engine.approximate.request import ApproximateRequest, ApproximateSequence
from engine.cache.digests import ChainHasher
from engine.cache.entries import Entries
from engine.cache.host_tier import HostTier
from engine.cache.ids import BlockId, TokenId
from engine.cache.lookup import Segment
from engine.cache.pool import BlockPool
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.cache.worth import Worths
from engine.clock import Clock, ManualClock
from engine.protocol import (
    Breakpoint,
    Delta,
    Document,
    Done,
    Event,
    Failed,
    Finished,
    FinishReason,
    Frame,
    GenerateRequest,
    HeldName,
    InputUsage,
    Message,
    Prompt,
    Sampling,
    ServiceClass,
    Started,
    TextDelta,
    TextPart,
    Ttl,
)
from engine.schedule.accounting import Accounting
from engine.schedule.loop import EngineLoop, StoreWork
from engine.schedule.output import OutputConstraint
from engine.schedule.request import Drafter, RequestState
from engine.schedule.runner import Runner, SampleParams, Work
from engine.schedule.scheduler import Scheduler
from engine.schedule.speculation import Speculation
from engine.schedule.waiting import WaitingClasses
from tests.engine.cache.checks import check_entries, check_pool

NUM_WORDS = 1000


def words(start: int, count: int) -> list[int]:
    return list(range(start, start + count))


def next_token(tokens: Sequence[TokenId], seed: int) -> TokenId:
    return crc32(repr((list(tokens), seed)).encode()) % NUM_WORDS


def expected(prompt: Sequence[TokenId], seed: int, count: int) -> list[TokenId]:
    """What a choice answers when nothing disturbs it."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, seed))
    return tokens[len(prompt) :]


STATE = 10**12
TURN = 10**5


def state_of(tokens: Sequence[TokenId]) -> int:
    """What a linear layer makes of these tokens."""
    return STATE + crc32(repr(list(tokens)).encode())


class FakeRunner:
    """With a recurrent state, a work must find that of exactly the tokens in front of it."""

    def __init__(self, num_blocks: int, block_size: int, host_blocks: int = 0) -> None:
        self._size = block_size
        self.host = [[-1] * block_size for _ in range(host_blocks)]
        self.memory = [[-1] * block_size for _ in range(num_blocks)]
        self.steps: list[list[Work]] = []

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """In any order, as on a device: so no block may be the destination of two."""
        assert len({destination for _, destination in pairs}) == len(pairs)
        sources = [list(self.memory[source]) for source, _ in pairs]
        for (_, destination), content in zip(pairs, sources, strict=True):
            self.memory[destination] = content

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        for block in blocks:
            self.memory[block] = [-1] * self._size

    def clear_from(self, places: Sequence[tuple[BlockId, int]]) -> None:
        for block, slot in places:
            self.memory[block][slot:] = [-1] * (self._size - slot)

    def clear_host(self, places: Sequence[tuple[BlockId, int]]) -> None:
        for block, slot in places:
            self.host[block][slot:] = [-1] * (self._size - slot)

    def demote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        assert len({destination for _, destination in pairs}) == len(pairs)
        for source, destination in pairs:
            self.host[destination] = list(self.memory[source])

    def promote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        assert len({destination for _, destination in pairs}) == len(pairs)
        for source, destination in pairs:
            self.memory[destination] = list(self.host[source])

    def save(self, blocks: Sequence[BlockId]) -> list[bytes]:
        return [struct.pack(f"{self._size}q", *self.memory[block]) for block in blocks]

    def load(self, loads: Sequence[tuple[bytes, BlockId]]) -> None:
        for payload, target in loads:
            self.memory[target] = list(struct.unpack(f"{self._size}q", payload))

    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        self.steps.append(list(works))
        slots: set[tuple[int, int]] = set()
        for work in works:
            for position, token in enumerate(work.token_ids, work.start):
                slot = (work.block_table[position // self._size], position % self._size)
                assert slot not in slots, "two sequences write to one slot"
                slots.add(slot)
                self.memory[slot[0]][slot[1]] = token
                assert max(self.memory[slot[0]]) < STATE, "what is left of a state may be no number"
        for work in works:
            self._move_state(work)
        return [self._answer(work) for work in works]

    def compress(
        self, compression: Compression, tokens: Sequence[TokenId], move: Move
    ) -> Iterator[int]:
        memory = [slot for block in move.sources for slot in self.memory[block]]
        assert memory[: compression.of] == list(tokens[: compression.of])
        kept_tokens = chosen(memory, compression)
        for start, end in move.ranges:
            for place in range(start, end):
                block, slot = divmod(place, self._size)
                self.memory[move.targets[block]][slot] = kept_tokens[place]
                if not (place + 1) % self._size:
                    yield 1

    def choose(
        self,
        tokens: Sequence[TokenId],
        gaps: Sequence[tuple[int, int]],
        documents: Sequence[Blend],
        targets: Sequence[int],
    ) -> Iterator[int]:
        """What is chosen depends on what stands in front, and what is written is not kept."""
        for start, end in gaps:
            for position in range(start, end):
                block, slot = divmod(position, self._size)
                self.memory[targets[block]][slot] = -1
            yield 1
        for document in documents:
            assert any(start <= document.start and document.end <= end for start, end in gaps)
            document.chosen.extend(blended(tokens, document.start, document.end, document.num))
            yield 1

    def place(self, shift: int, move: Move) -> Iterator[int]:
        """A number that was copied tells by how much it was turned."""
        for start, end in move.ranges:
            for position in range(start, end):
                block, slot = divmod(position - shift, self._size)
                number = self.memory[move.sources[block]][slot]
                assert number < TURN, "a copy of a copy"
                block, slot = divmod(position, self._size)
                self.memory[move.targets[block]][slot] = number + TURN * (shift + 1)
            yield 1

    def take_over(self, own_layers: int, tokens: Sequence[TokenId], move: Move) -> Iterator[int]:
        """A number tells that it is a sibling's."""
        memory = [slot for block in move.sources for slot in self.memory[block]]
        assert own_layers
        for start, end in move.ranges:
            assert memory[start:end] == list(tokens[start:end])
        yield from self.place(0, move)

    def _move_state(self, work: Work) -> None:
        if work.state is None:
            return
        source, target = work.state
        numbers = [slot for block in work.block_table for slot in self.memory[block]]
        assert (source is None) == (work.start == 0)
        for number, block in enumerate(source or ()):
            assert self.memory[block] == [state_of(numbers[: work.start]) + number] * self._size
        for number, block in enumerate(target):
            state = state_of(numbers[: work.start + len(work.token_ids)]) + number
            self.memory[block] = [state] * self._size

    def _answer(self, work: Work) -> TokenId | None:
        if work.sample is None:
            return None
        end = work.start + len(work.token_ids) - len(work.draft)
        memory = [slot for block in work.block_table for slot in self.memory[block]]
        first = token = next_token(memory[:end], work.sample.seed)
        for proposed in work.draft:
            end += 1
            if token != proposed:
                break
            token = next_token(memory[:end], work.sample.seed)
            work.behind.append(token)
        return first


def chosen(tokens: Sequence[TokenId], how: Compression) -> list[TokenId]:
    """What the fake runner keeps of a prefix."""
    return [tokens[place * how.of // how.kept] for place in range(how.kept)]


def in_memory(state: RequestState) -> list[TokenId]:
    """What stands in the memory of a prompt."""
    query = state.query
    if not isinstance(state, ApproximateRequest):
        return list(query.tokens)
    prompt = state.prompt
    if prompt.compression is not None:
        kept_tokens = chosen(prompt.real, prompt.compression)
        return [*kept_tokens, *query.tokens[prompt.compression.kept :]]
    tokens = list(prompt.real or query.tokens)
    for document in prompt.placed:
        num = document.copied - document.start
        again = range(document.start, document.copied)
        if document.is_chosen:
            again = blended(prompt.real, document.start, document.end, num)
        for position in set(range(document.start, document.end)).difference(again):
            tokens[position] += TURN * (document.shift + 1)
    return tokens


def blended(tokens: Sequence[TokenId], start: int, end: int, num: int) -> list[int]:
    """What the fake runner chooses of a document."""
    return sorted(random.Random(sum(tokens[:end])).sample(range(start, end), num))


class Words:
    """A parser that says every token as a word."""

    def __init__(self, stop: TokenId | None = None) -> None:
        self.finish: FinishReason | None = None
        self.stop_sequence: str | None = None
        self.thinking_tokens = 0
        self.allowed: bytes | None = None
        self.constraint: OutputConstraint | None = None
        self._stop = stop

    def feed(self, token_id: TokenId) -> Sequence[Delta]:
        if token_id == self._stop:
            self.finish = "stop"
        return [TextDelta(str(token_id))]

    def close(self) -> Sequence[Delta]:
        return []


@dataclass(eq=False)
class Sent:
    """A request and what came back."""

    state: RequestState
    frames: list[Frame]

    @property
    def started(self) -> Started | None:
        return next((frame for frame in self.frames if isinstance(frame, Started)), None)

    @property
    def begun(self) -> Started:
        assert self.started is not None
        return self.started

    @property
    def usage(self) -> InputUsage:
        return self.begun.usage

    @property
    def is_over(self) -> bool:
        return bool(self.frames) and isinstance(self.frames[-1], Done | Failed)

    @property
    def finishes(self) -> list[Finished]:
        return [frame for frame in self.frames if isinstance(frame, Finished)]

    def answer(self, choice: int = 0) -> list[TokenId]:
        """The tokens a choice sampled, as its sequence has them."""
        sequence = self.state.sequences[choice]
        tokens = sequence.tokens
        if isinstance(sequence, ApproximateSequence) and sequence.set_aside is not None:
            tokens = sequence.set_aside.tokens
        return tokens[len(self.state.query.tokens) :]

    def wanted(self, choice: int = 0) -> list[TokenId]:
        sequence = self.state.sequences[choice]
        prompt = in_memory(self.state)
        return expected(prompt, sequence.sample.seed, len(self.answer(choice)))


def _placed(
    segments: Sequence[Sequence[TokenId]], documents: Mapping[int, Ttl], recompute: int | float
) -> list[DocumentPlace]:
    """Where the segments that are documents stand."""
    ends = list(accumulate(map(len, segments)))
    return [
        DocumentPlace(
            Document(index, ttl, recompute, str(segments[index][0])),
            ends[index] - len(segments[index]),
            ends[index],
        )
        for index, ttl in sorted(documents.items())
    ]


class Harness:
    _num_sent = 0

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        block_size: int = 4,
        max_step_tokens: int = 16,
        max_running: int = 8,
        max_waiting: int = 16,
        lease_share: float = 0.5,
        max_context_tokens: int = 10_000,
        clock: Clock | None = None,
        runner: Runner | None = None,
        scaffold: TokenId | None = 9999,
        host_blocks: int = 0,
        max_copies: int = 4,
        cache: PrefixCache | None = None,
        store: StoreWork | None = None,
        new_drafter: Callable[[], Drafter] | None = None,
        state_blocks: int = 0,
        sibling: Sibling | None = None,
    ) -> None:
        """`cache`, where it is given, has the tiers and entries; `store` does the store's work."""
        self.clock = clock or ManualClock()
        if cache is None:
            pool = BlockPool(num_blocks, block_size, worths=Worths())
            host = HostTier(pool, host_blocks, max_copies) if host_blocks else None
            entries = Entries(pool, lease_share=lease_share, host=host.pool if host else None)
            hasher = ChainHasher(b"key", block_size)
            cache = PrefixCache(pool, entries, hasher, host, state_blocks=state_blocks)
        self.cache = cache
        self.pool = self.cache.pool
        self.entries = self.cache.entries
        self.host = self.cache.host
        self.scheduler = Scheduler(
            self.cache, max_step_tokens=max_step_tokens, max_running=max_running
        )
        if new_drafter is not None:
            self.scheduler.speculation = Speculation(
                new_drafter,
                max_step_tokens=max_step_tokens,
                max_context_tokens=max_context_tokens,
            )
        self.events: list[Event] = []
        self.accounting = Accounting(
            self.cache,
            self.clock,
            self.events.extend,
            epoch="e",
            max_context_tokens=max_context_tokens,
        )
        self.totals = self.accounting.totals
        fake = runner if isinstance(runner, FakeRunner) else None
        self.runner = fake or FakeRunner(num_blocks, block_size, host_blocks)
        runner = runner or self.runner
        self.loop = EngineLoop(
            self.scheduler, self.accounting, runner, max_waiting=max_waiting, store=store
        )
        self._sibling = sibling
        self._scaffold = scaffold

    def send(
        self,
        *segments: Sequence[TokenId],
        marks: dict[int, Ttl] | None = None,
        max_tokens: int = 4,
        choices: int = 1,
        seed: int = 1,
        scope: str = "s",
        stop: TokenId | None = None,
        service_class: ServiceClass = "interactive",
        has_names: bool = False,
        keep: tuple[int, float] | None = None,
        documents: dict[int, Ttl] | None = None,
        recompute: int | float = 3,
        sibling: int | None = None,
        hold: bool = True,
        seconds: float | None = None,
        sample: SampleParams | None = None,
    ) -> Sent:
        """Submit a prompt of token segments and one token of scaffold, where there is one.

        `has_names`: each segment's end has the name that a gateway would give it. Of what ends
        with the segment `keep[0]` the part `keep[1]` is kept, in whole blocks. The segments that
        are `documents` stand anywhere. What ends with the segment `sibling` may be a sibling's.
        Marks ask for a lease where they `hold`, and live for their own `seconds`, if there are any.
        `sample`, where it is given, is each choice's, with a seed of its own.
        """
        self._num_sent += 1
        tokens: list[TokenId] = []
        spans: list[Segment] = []
        for segment in segments:
            tokens.extend(segment)
            spans.append(Segment("text", len(tokens), 0))
        if self._scaffold is not None:
            tokens.append(self._scaffold)
        points = [
            Breakpoint(index, ttl, seconds=seconds, hold=hold)
            for index, ttl in (marks or {}).items()
        ]
        query = CacheQuery(
            scope=scope,
            tokens=tokens,
            digests=self.cache.digests(scope, tokens),
            segments=spans,
            breakpoints=points,
            names=_names(scope, tokens, spans) if has_names else [],
            min_cache_tokens=1,
            arrived_at=self.clock.now(),
        )
        prompt: ApproximatePrompt | None = None
        if keep is not None:
            prompt = self._compressed(query, *keep)
        if documents:
            prompt = with_documents(query, self.cache, _placed(segments, documents, recompute))
        if sibling is not None and self._sibling is not None:
            prompt = with_sibling_mark(query, self.cache, self._sibling, sibling)
        sampling = Sampling(max_tokens=max_tokens, num_choices=choices)
        like = sample or SampleParams(temperature=1, top_p=1, top_k=0, seed=seed)
        return self._submit(query, prompt, sampling, like, stop, service_class)

    def _compressed(
        self, query: CacheQuery, segment: int, share: float
    ) -> ApproximatePrompt | None:
        """The prompt of which a share is kept up to a segment's end, in whole blocks."""
        end = query.segments[segment].end
        if end is None:
            return None
        size = self.pool.block_size
        num_kept = max(int(end * share) // size, 1) * size
        return compressed(query, self.cache, Compression("keydiff", share, end, num_kept))

    def _submit(
        self,
        query: CacheQuery,
        prompt: ApproximatePrompt | None,
        sampling: Sampling,
        sample: SampleParams,
        stop: TokenId | None,
        service_class: ServiceClass,
    ) -> Sent:
        frames: list[Frame] = []
        points = query.breakpoints
        new_request: Callable[..., RequestState] = RequestState
        if prompt is not None:
            query = prompt.query
            new_request = partial(ApproximateRequest, prompt=prompt, compressor=self.runner)
        state = new_request(
            request=GenerateRequest(
                request_id=f"r{self._num_sent}",
                scope=query.scope,
                prompt=Prompt(messages=[Message("user", [TextPart("")])]),
                sampling=sampling,
                breakpoints=points,
                service_class=service_class,
            ),
            query=query,
            parsers=[Words(stop) for _ in range(sampling.num_choices)],
            emit=frames.append,
            submitted_at=self.clock.now(),
        )
        choices = range(sampling.num_choices)
        samples = [replace(sample, seed=sample.seed + choice) for choice in choices]
        self.loop.submit(state, samples)
        return Sent(state, frames)

    def done(self, *segments: Sequence[TokenId], **more: Any) -> Sent:
        """A request that is over."""
        sent = self.send(*segments, **more)
        self.finish(sent)
        return sent

    def step(self, count: int = 1) -> None:
        """Steps, each followed by every check there is."""
        for _ in range(count):
            self.loop.step()
            check_pool(self.pool)
            check_entries(self.entries)
            check_waiting(self.scheduler.waiting)
            if self.host is not None:
                check_pool(self.host.pool)

    def finish(self, *sents: Sent, limit: int = 2000) -> None:
        """Step until all are over; they must end, and say what they would have said alone."""
        for _ in range(limit):
            if all(sent.is_over for sent in sents):
                break
            self.step()
        for sent in sents:
            assert sent.is_over, "it never ended"
            if sent.started is not None:
                query = sent.state.query
                _check_usage(sent.started.usage, len(query.tokens) + query.cut)
            for choice in range(len(sent.state.sequences)):
                assert sent.answer(choice) == sent.wanted(choice)

    def check_idle(self) -> None:
        """Nothing runs: the only references left are leases."""
        pending = [entry for entry in self.cache.entries.live() if entry.refreshed_until]
        assert not pending, "a refresh of a request that is over was neither kept nor taken back"
        assert not self.scheduler.has_work
        counts = self.pool.counts()
        assert counts.active == 0
        assert isinstance(self.clock, ManualClock)
        self.clock.advance(3600)
        self.step()
        assert self.pool.num_reclaimable == self.pool.num_blocks
        if self.host is not None:
            assert self.host.pool.num_reclaimable == self.host.pool.num_blocks


def occupied(engine: Harness, blocks: int, max_tokens: int = 60, scope: str = "z") -> Sent:
    """A request that runs and holds about so many blocks of four tokens."""
    sent = engine.send(words(90_000, 4 * blocks - 2), scope=scope, max_tokens=max_tokens)
    while sent.started is None:
        engine.step()
    return sent


def _check_usage(usage: InputUsage, prompt_tokens: int) -> None:
    """Every token is in one class, and what was read or reused was not computed."""
    assert usage.prompt_tokens == prompt_tokens
    reused = usage.cache_read_tokens + usage.automatic_tokens
    assert reused + usage.computed_tokens == prompt_tokens
    counts = msgspec.structs.asdict(usage)
    assert all(count >= 0 for count in counts.values()), f"a count below zero: {counts}"
    assert usage.computed_tokens > 0, "the last token is always computed"


def _names(scope: str, tokens: Sequence[TokenId], spans: Sequence[Segment]) -> list[HeldName]:
    prefixes = ((span.end, f"{scope} {tokens[: span.end]}".encode()) for span in spans)
    return [HeldName(blake2b(text, digest_size=8).hexdigest(), end) for end, text in prefixes]


def check_waiting(waiting: WaitingClasses) -> None:
    """Each sequence waits once, in the line of its scope."""
    for is_batch in (False, True):
        queue = waiting[is_batch]
        assert len(list(queue)) == len(set(map(id, queue))) == len(queue)
        for scope, line in queue._lines.items():
            assert line and all(sequence.scope == scope for sequence in line)
            assert scope in queue._served
