"""Plays a sequence on a server and on the reference model: the counters must be equal."""

import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any

from engine.protocol import Document, Ttl
from tests.conformance.oracle import Cache, Err
from tests.fuzz.sequence import Alone, Arrival, Begin, Queue, Sequence, Turn
from tests.fuzz.servers import MINIMUMS, Outcome, Sent, Server
from tests.fuzz.talks import KEEP, resolved

BLOCK = 16
LEAST_KEPT = 64
"""Of a compressed prefix whole blocks are kept, and no fewer tokens."""
SECONDS = {"5m": 300, "1h": 3600}
Counts = tuple[int, int, int, int]


class WithStates(Cache):
    """The reference for a model with linear layers. A marker in front of what is read writes no
    entry: a turn passes no state there, because it goes on from the state behind it."""

    def run(self, *args: Any, **kwargs: Any) -> dict[str, int]:
        before = dict(self.store)
        counts: dict[str, int] = super().run(*args, **kwargs)
        for key, entry in list(self.store.items()):
            if entry.tokens < counts["read"] and before.get(key) is not entry:
                del self.store[key]
                if key in before:
                    self.store[key] = before[key]
        return counts


@dataclass
class Waiting:
    """A turn that an engine has and has not answered; `number` is its place in the sequence."""

    turn: Turn
    sent: Sent
    number: int
    want: Counts


@dataclass
class Entry:
    """Of a document."""

    ttl: Ttl
    expires: float = 0.0


@dataclass
class Player:
    """`now` is the engines' time, in seconds; `differences` has a line for each."""

    server: Server
    now: float = 0.0
    tally: Counter[str] = field(default_factory=Counter)
    differences: list[str] = field(default_factory=list)

    def play(self, seed: int, *, can_queue: bool = True) -> None:
        sequence = Sequence(
            seed,
            num_scopes=self.server.num_scopes,
            num_models=self.server.num_models,
            has_tools=self.server.has_tools,
            can_queue=can_queue,
            checks_marks=self.server.checks_marks,
            granularity=self.server.machines.granularity,
            has_kinds=self.server.has_kinds,
        )
        self._seed = seed
        self._number = 0
        self._documents: dict[tuple[int, int, str], Entry] = {}
        kind = WithStates if self.server.machines.keeps_states else Cache
        self._models = [kind(min_cache_tokens=MINIMUMS[m]) for m in range(self.server.num_models)]
        for event in sequence.events():
            if isinstance(event, Alone):
                self._advance(event.wait)
                self._play_alone(event.turn)
            else:
                self._play_queue(event)
        self.tally.update(sequence.tally)
        self.tally["sequences"] += 1
        self.server.machines.clear()

    def _play_alone(self, turn: Turn) -> None:
        if (document := turn.document) is not None:
            entry = self._documents.get(self._key(turn, document))
            if entry is not None and self.now >= entry.expires:
                # The copy in the prompt's own blocks outlives it, and is no entry.
                turn = replace(turn, document=None)
        want = self._reference(turn, begin=self.now)
        outcome = self.server.ask(turn)
        if turn.document is not None and want is not None:
            want = self._with_document(turn, turn.document, want, outcome)
        self._compare(turn, self._next_number(), outcome, want)
        if turn.end == "left":
            self.tally["broken off after the first event"] += 1

    def _key(self, turn: Turn, document: Document) -> tuple[int, int, str]:
        return turn.model, turn.scope, turn.talk.texts[document.segment]

    def _with_document(
        self, turn: Turn, document: Document, want: Counts, outcome: Outcome
    ) -> Counts | None:
        """The counts by the contract, and with an entry of the document by itself.

        How many tokens that has, the server alone knows: more than it has words, and no more than
        its segment. Of the others so many are computed as were asked for.
        """
        assert outcome.document is not None
        size = sum(outcome.document)
        recomputed = outcome.document[1]
        sizes = self.server.machines.sizes(turn)
        at = document.segment
        end = sizes.ends[at]
        before = sizes.ends[at - 1] if at else 0
        key = self._key(turn, document)
        recompute = document.recompute
        assert len(key[2].split()) < size <= end - before
        assert recomputed == (
            recompute if isinstance(recompute, int) else math.ceil(recompute * size)
        )
        tokens = want[0]
        read_tokens = want[1]
        short = want[2]
        long = want[3]
        classes = ["read"] * read_tokens + ["1h"] * long + ["5m"] * short + ["input"] * tokens
        entry = self._documents.get(key)
        copied = range(max(end - size + recomputed, read_tokens), end)
        if entry is None:
            entry = self._documents[key] = Entry(document.ttl)
            for place in copied:
                if classes[place] == "input" or (classes[place], document.ttl) == ("5m", "1h"):
                    classes[place] = document.ttl
        else:
            classes[copied.start : copied.stop] = ["read"] * len(copied)
            self.tally["document hits"] += len(copied) > 0
        entry.expires = max(entry.expires, self.now + SECONDS[entry.ttl])
        self.tally["documents"] += 1
        counted = Counter(classes)
        return counted["input"], counted["read"], counted["5m"], counted["1h"]

    def _play_queue(self, queue: Queue) -> None:
        """The engine is kept busy by others; who is to begin gets a place, or all do."""
        self._advance(queue.wait)
        begins = _begin_times(queue, self.now)
        is_expiry_within = self._expires_before(max(begins.values(), default=self.now))
        waiting: deque[Waiting] = deque()
        running: list[Sent] = []
        with self.server.machines.full(queue.model) as blockers:
            for index, event in enumerate(queue.events):
                self._advance(event.wait)
                if isinstance(event, Begin):
                    self._cancel(waiting, only_front=not queue.is_burst)
                    places = blockers if queue.is_burst else blockers[-1:]
                    for place in list(places):
                        self.server.machines.engines[queue.model].cancel(place.request_id)
                        blockers.remove(place)
                    if not places and not queue.is_burst:
                        running.pop(0).close()
                    running.append(self._begin(waiting.popleft()))
                    self._cancel(waiting)
                elif event.turn.end != "cancelled" or not is_expiry_within:
                    waiting.append(self._send(event.turn, begins.get(index)))
                    self.tally["overlaps"] += len(waiting) > 1
            self._cancel(waiting)
            assert not waiting
        for sent in running:
            sent.close()
        self.server.machines.engines[queue.model].wait_until_idle(30)

    def _send(self, turn: Turn, begin: float | None) -> Waiting:
        want = self._reference(turn, begin)
        return Waiting(turn, self.server.send(turn), self._next_number(), want or (0, 0, 0, 0))

    def _begin(self, next_one: Waiting) -> Sent:
        self._compare(next_one.turn, next_one.number, next_one.sent.begin(), next_one.want)
        if next_one.turn.end == "left":
            self.tally["broken off after the first event"] += 1
        return next_one.sent

    def _cancel(self, waiting: deque[Waiting], *, only_front: bool = True) -> None:
        """Before they could take the place of who is to begin."""
        for next_one in list(waiting):
            if next_one.turn.end == "cancelled":
                waiting.remove(next_one)
                self.server.cancel(next_one.turn, next_one.sent)
                self.tally["cancelled before the first event"] += 1
            elif only_front:
                return

    def _reference(self, turn: Turn, begin: float | None) -> Counts | None:
        """What the contract says; None is a refusal. Without a `begin` nothing is written."""
        sizes = self.server.machines.sizes(turn)
        model = self._models[turn.model]
        marks = turn.marks
        kind = ""
        if turn.keep is not None:
            num_kept = -(-int(sizes.ends[turn.keep] * KEEP) // BLOCK) * BLOCK
            if not LEAST_KEPT <= num_kept < sizes.ends[turn.keep]:
                return None
            # Marks in front hold nothing. From this one on entries are found by their kind alone.
            behind = {at: ttl for at, ttl in marks.explicit.items() if at >= turn.keep}
            marks = marks._replace(explicit=behind)
            kind = f" {turn.keep} {KEEP}"
        try:
            want = model.run(
                turn.talk.blocks(sizes.ends, marks, turn.document),
                auto=marks.automatic,
                t=self.now,
                begin=self.now if begin is None else begin,
                g=sizes.tail,
                scope=f"{turn.scope}{kind}",
                ok=begin is not None,
            )
        except Err:
            return None
        return want["inp"], want["read"], want["w5"], want["w1"]

    def _compare(self, turn: Turn, number: int, outcome: Outcome, want: Counts | None) -> None:
        self._count(turn, outcome)
        if outcome.usage != want:
            self.differences.append(
                f"seed {self._seed} turn {number}: (input, read, 5m, 1h) {outcome.usage}, "
                f"the reference model says {want}"
            )
        elif want is not None and turn.keep is None and turn.document is None:
            self._compare_marks(turn, number, outcome, want[1])

    def _compare_marks(self, turn: Turn, number: int, outcome: Outcome, read_tokens: int) -> None:
        """A breakpoint has a reason where the reference reads less than what stands up to it."""
        ends = self.server.machines.sizes(turn).ends
        marked = sorted(resolved(turn.talk, turn.marks))
        has_reason = [reason is not None for reason in outcome.missed]
        if has_reason != [ends[segment] > read_tokens for segment in marked]:
            self.differences.append(
                f"seed {self._seed} turn {number}: missed {outcome.missed}, the reference model"
                f" reads {read_tokens} tokens of marks at {[ends[segment] for segment in marked]}"
            )
        self.tally.update(f"mark: {reason}" for reason in outcome.missed if reason is not None)

    def _count(self, turn: Turn, outcome: Outcome) -> None:
        """The exercised cases, by the server's own report."""
        self.tally["turns"] += 1
        if outcome.usage is None:
            self.tally["refused"] += 1
            return
        _, read_tokens, short, long = outcome.usage
        self.tally["hits"] += read_tokens > 0
        self.tally["full hits"] += read_tokens > 0 and short + long == 0
        self.tally["partial hits"] += read_tokens > 0 and short + long > 0
        self.tally["5m writes"] += short > 0
        self.tally["1h writes"] += long > 0
        self.tally["read tokens"] += read_tokens
        self.tally["written tokens"] += short + long
        self.tally["exact hits"] += turn.keep is None and turn.document is None and read_tokens > 0
        self.tally["compressed"] += turn.keep is not None
        self.tally["compressed hits"] += turn.keep is not None and read_tokens > 0
        self.tally["of other scopes"] += turn.scope > 0
        self.tally["of the second model"] += turn.model > 0
        self.tally["automatic markers"] += turn.marks.automatic is not None
        if outcome.miss_reason is not None:
            self.tally[f"miss: {outcome.miss_reason}"] += 1
        ttls = [ttl for _, ttl in sorted(resolved(turn.talk, turn.marks).items())]
        for ttl, (has, state) in zip(ttls, outcome.entries, strict=True):
            self.tally["cross-TTL matches"] += has is not None and has != ttl
            self.tally["best-effort entries"] += state == "best_effort"
            self.tally["best-effort hits"] += state == "best_effort" and short + long == 0

    def _expires_before(self, until: float) -> bool:
        """Is there an entry whose life a turn that is cancelled later could bridge?

        What its look-up refreshed lives on while it waits, which the reference model, told at
        arrival what becomes of a turn, cannot know.
        """
        entries = [entry for model in self._models for entry in model.store.values()]
        return any(self.now <= entry.expires <= until for entry in entries)

    def _advance(self, seconds: float) -> None:
        self.now += seconds
        self.server.machines.advance(seconds)

    def _next_number(self) -> int:
        self._number += 1
        return self._number - 1


def _begin_times(queue: Queue, now: float) -> dict[int, float]:
    """When each arrival, by its index among the events, begins to answer."""
    waiting: deque[int] = deque()
    times: dict[int, float] = {}
    for index, event in enumerate(queue.events):
        now += event.wait
        if isinstance(event, Arrival):
            if event.turn.end != "cancelled":
                waiting.append(index)
        else:
            times[waiting.popleft()] = now
    return times
