"""One random sequence of turns, as a plan: the senders, the prompts and the times.

Pure; a seed always gives the same plan.

Most turns are alone. In a *queue* several wait at once and begin to answer one after the other, at
times of their own; in a *burst* all that waited begin together. Their span stays below the shortest
TTL: beyond it the reference model, which notes a write when its request arrives and not when its
response begins, is no longer the contract.
"""

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace

from engine.protocol import Document, Ttl
from tests.fuzz.talks import Marks, Talk, break_marks, choose_marks

WAITS = (0, 0, 0, 0, 1, 1, 10, 60, 120, 240, 299, 299.75, 300, 301, 1800, 3599.75, 3600)
# A response begins after everything that arrived before it; time that stands still has no order.
BEGIN_WAITS = (0.25, 1, 10, 25)
ARRIVAL_WAITS = (0, *BEGIN_WAITS)
STEPS = 8
LONGEST = 200
DOCUMENT_TTLS: tuple[Ttl, ...] = ("5m", "1h")
LEAST_WORDS = 70
"""A document has at least 64 tokens."""


@dataclass(frozen=True)
class Turn:
    """`scope` and `model` are indices; `end` says what becomes of its response.

    `done` is read to its end, `warm` asks for none, `left` is broken off after the first event,
    `cancelled` before it. `keep` is the marked segment of whose prefix a part is kept. Segment
    `document` stands anywhere.
    """

    talk: Talk
    marks: Marks
    scope: int
    model: int
    end: str
    is_broken: bool = False
    keep: int | None = None
    document: Document | None = None


@dataclass(frozen=True)
class Alone:
    turn: Turn
    wait: float


@dataclass(frozen=True)
class Arrival:
    turn: Turn
    wait: float


@dataclass(frozen=True)
class Begin:
    """The next that waits begins to answer."""

    wait: float


@dataclass(frozen=True)
class Queue:
    """Between first and last event everything of `model` that was not begun waits.

    In a burst the begins come last, with no time between them.
    """

    model: int
    wait: float
    events: list[Arrival | Begin]
    is_burst: bool


class Sequence:
    """`num_models` and `num_scopes` bound the indices; `checks_marks`: broken rules are refused.

    `has_kinds`: half of the turns that are alone ask for a compressed prefix, and half of the
    others for a document that stands anywhere, where there is a long one. Chance of its own chooses
    them, so the talks and times are those without.
    """

    def __init__(
        self,
        seed: int,
        *,
        num_scopes: int,
        num_models: int,
        has_tools: bool = True,
        can_queue: bool = True,
        checks_marks: bool = False,
        granularity: int = 1,
        has_kinds: bool = False,
    ) -> None:
        self.seed = seed
        self._has_kinds = has_kinds
        self._kinds_rng = random.Random(f"kinds {seed}")
        self._documents: set[str] = set()
        self._last_keep = -1
        self._documents_rng = random.Random(f"documents {seed}")
        self.rng = random.Random(seed)
        self.tally: Counter[str] = Counter()
        self._num_scopes = num_scopes
        self._num_models = num_models
        self._can_queue = can_queue
        self._checks_marks = checks_marks
        talk = Talk(self.rng, f"{seed}", LONGEST, has_tools)
        talk.padding = granularity if granularity > 1 else 0
        talk.begin()
        self._talks = [talk]
        self._model = self.rng.randrange(num_models)
        self._last_marks: dict[str, Marks] = {}

    def events(self) -> Iterator[Alone | Queue]:
        for _ in range(STEPS):
            talk = self._next_talk()
            kind = self.rng.choices(["alone", "queue", "burst"], [80, 10, 10])[0]
            if kind == "alone" or not self._can_queue:
                turn = self._with_document(self._of_kind(self._turn(talk)))
                yield Alone(turn, self.rng.choice(WAITS))
            else:
                yield self._queue(talk, kind == "burst")

    def _of_kind(self, turn: Turn) -> Turn:
        """Perhaps with a marker that asks for a part of its prefix, often where one did the last
        time, and with the turn's own markers of five minutes behind it."""
        rng = self._kinds_rng
        kinds = turn.talk.kinds
        is_fit = self._has_kinds and not turn.is_broken and turn.end != "left"
        if not is_fit or rng.random() < 0.5:
            return turn
        places = [place for place, kind in enumerate(kinds) if kind != "thinking"]
        if self._last_keep not in places or rng.random() < 0.2:
            self._last_keep = rng.choice(places)
        keep = self._last_keep
        behind = {at: ttl for at, ttl in turn.marks.explicit.items() if ttl == "5m" and at > keep}
        automatic = turn.marks.automatic if keep < places[-1] else None
        marks = Marks({keep: "1h", **behind}, "5m" if automatic else None)
        return replace(turn, marks=marks, keep=keep)

    def _with_document(self, turn: Turn) -> Turn:
        """Perhaps with a text or result of a tool that stands anywhere, without a marker there."""
        rng = self._documents_rng
        is_fit = turn.keep is None and turn.end != "left"
        if not (self._has_kinds and is_fit) or turn.is_broken or rng.random() < 0.5:
            return turn
        texts = turn.talk.texts
        long = [at for at, text in texts.items() if len(text.split()) > LEAST_WORDS]
        if not long:
            return turn
        again = [at for at in long if texts[at] in self._documents]
        at = rng.choice(again or long)
        self._documents.add(texts[at])
        document = Document(at, rng.choice(DOCUMENT_TTLS), rng.choice([16, 0.15]))
        explicit = {place: ttl for place, ttl in turn.marks.explicit.items() if place != at}
        return replace(turn, marks=turn.marks._replace(explicit=explicit), document=document)

    def _next_talk(self) -> Talk:
        """One of the conversations, changed as conversations are."""
        talk = self.rng.choice(self._talks[-3:])
        if self.rng.random() < 0.15:
            talk = talk.fork(f"{self.seed}f{len(self._talks)}")
            self._talks.append(talk)
            self._note("forks")
        self._change(talk)
        return talk

    def _change(self, talk: Talk) -> None:
        match self.rng.choice(["grow", "grow", "grow", "edit", "cut", "same", "same"]):
            case "grow":
                talk.grow()
            case "edit":
                talk.edit()
                self._note("edits")
            case "cut":
                talk.cut()
                self._note("cuts")

    def _turn(
        self, talk: Talk, end: str = "", ttls: tuple[Ttl, ...] = ("1h", "5m"), scope: int = -1
    ) -> Turn:
        """With a copy of the talk as it is now."""
        is_broken = self._checks_marks and not end and self.rng.random() < 0.05
        marks = break_marks(self.rng, talk) if is_broken else self._marks(talk, ttls)
        return Turn(
            talk.fork(talk.name),
            marks,
            self._mostly_first(self._num_scopes) if scope < 0 else scope,
            self._model if self.rng.random() < 0.9 else self.rng.randrange(self._num_models),
            "done" if is_broken else end or self.rng.choice(["done"] * 6 + ["warm", "left"]),
            is_broken,
        )

    def _marks(self, talk: Talk, ttls: tuple[Ttl, ...]) -> Marks:
        """Often where they were the last time, as clients do."""
        again = self._last_marks.get(talk.name)
        kinds = talk.kinds
        if again is not None and len(ttls) > 1 and self.rng.random() < 0.4:
            last = len(kinds) - (again.automatic is not None)
            if all(place < last and kinds[place] != "thinking" for place in again.explicit):
                return again
        marks = choose_marks(self.rng, talk, ttls)
        self._last_marks[talk.name] = marks
        return marks

    def _mostly_first(self, number: int) -> int:
        return self.rng.choice([*[0] * 3 * number, *range(number)])

    def _queue(self, talk: Talk, is_burst: bool) -> Queue:
        """Two to four turns of one scope and model, of one conversation with variants.

        Those of a burst have one TTL: which of two that begin together wrote first is not settled.
        """
        rng = self.rng
        ttls: tuple[Ttl, ...] = (rng.choice(["5m", "1h"]),) if is_burst else ("1h", "5m")
        scope = self._mostly_first(self._num_scopes)
        number = rng.randint(2, 4)
        arrivals: list[Arrival | Begin] = []
        first = self._turn(talk, "done", ttls, scope)
        for index in range(number):
            variant = talk.fork(f"{self.seed}q{rng.getrandbits(32):x}")
            if index and rng.random() < 0.5:
                self._change(variant)
            end = "cancelled" if rng.random() < 0.25 else ("done" if is_burst else "left")
            turn = self._turn(variant, end, ttls, scope)
            arrivals.append(
                Arrival(
                    Turn(turn.talk, turn.marks, scope, first.model, end), rng.choice(ARRIVAL_WAITS)
                )
            )
        begins: list[Arrival | Begin] = []
        for arrival in arrivals:
            assert isinstance(arrival, Arrival)
            if arrival.turn.end != "cancelled":
                begins.append(Begin(0 if is_burst and begins else rng.choice(BEGIN_WAITS)))
        events = arrivals + begins if is_burst else _interleaved(rng, arrivals, begins)
        self._note("bursts" if is_burst else "queues")
        return Queue(first.model, rng.choice(WAITS), events, is_burst)

    def _note(self, what: str) -> None:
        self.tally[what] += 1


def _interleaved(
    rng: random.Random, arrivals: list[Arrival | Begin], begins: list[Arrival | Begin]
) -> list[Arrival | Begin]:
    """In their order, each begin behind its arrival."""
    events: list[Arrival | Begin] = []
    arrivals = list(arrivals)
    begins = list(begins)
    num_waiting = 0
    while arrivals or begins:
        if arrivals and (num_waiting == 0 or rng.random() < 0.7):
            arrival = arrivals.pop(0)
            assert isinstance(arrival, Arrival)
            num_waiting += arrival.turn.end != "cancelled"
            events.append(arrival)
        elif num_waiting:
            events.append(begins.pop(0))
            num_waiting -= 1
    return events
