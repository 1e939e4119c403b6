"""What the sequences are played on: engines by their protocol, or a gateway before them by HTTP."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import httpx
import msgspec

from engine.protocol import CountReply, EntryState, Prompt, Started, Ttl
from engine.protocol.reports import EntryInfo
from tests.conformance.engines import Engine, Stream, prompt
from tests.fuzz.sequence import Turn
from tests.fuzz.talks import resolved

SLOTS = 2
GATEWAY_SLOTS = 4
"""So many, and one more, the gateway sends to an engine; beyond that they would wait there."""
MINIMUMS = (32, 48)
ENDLESS = 100_000
WAIT_SECONDS = 180


class Sizes(NamedTuple):
    """`ends` of the segments, in tokens; `tail` is what is rendered behind the last."""

    ends: list[int]
    tail: int


class Outcome(NamedTuple):
    """`usage` is (input, read, 5m writes, 1h writes), None where the turn was refused.

    `entries`: what the server says of each breakpoint's entry, in the prompt's order. `document`:
    how many of its tokens were copied, and how many computed where it stands.
    """

    usage: tuple[int, int, int, int] | None
    miss_reason: str | None = None
    entries: tuple[tuple[Ttl | None, EntryState], ...] = ()
    document: tuple[int, int] | None = None


class Sent(Protocol):
    """A turn at an engine. Its response has not been read yet."""

    def begin(self) -> Outcome:
        """Wait for the first event."""
        ...

    def close(self) -> None:
        """Break off, or read to the end what is over."""
        ...


class Server(Protocol):
    """`checks_marks`: broken rules of markers are refused, not undefined. `has_kinds`: its engines
    compress prefixes, and its workspaces may ask for it."""

    machines: "Machines"
    num_models: int
    num_scopes: int
    has_tools: bool
    checks_marks: bool
    has_kinds: bool

    def ask(self, turn: Turn) -> Outcome: ...
    def send(self, turn: Turn) -> Sent: ...
    def cancel(self, turn: Turn, sent: Sent) -> None:
        """End it before its first event; what it held is free when this returns."""
        ...


def outcome_of(started: Started) -> Outcome:
    usage = started.usage
    counts = (
        usage.input_tokens,
        usage.cache_read_tokens,
        usage.cache_write_5m_tokens,
        usage.cache_write_1h_tokens,
    )
    entries = tuple((report.ttl, report.state) for report in started.breakpoints)
    return Outcome(counts, started.miss_reason, entries)


def message_outcome(message: dict[str, Any]) -> Outcome:
    """Of an answer of the Messages API; its counters must agree with each other."""
    usage, extension = message["usage"], message["holdfast"]
    created = usage["cache_creation"]
    short, long = created["ephemeral_5m_input_tokens"], created["ephemeral_1h_input_tokens"]
    assert usage["cache_creation_input_tokens"] == short + long
    counts = (usage["input_tokens"], usage["cache_read_input_tokens"], short, long)
    entries = tuple((point.get("ttl"), point["state"]) for point in extension["breakpoints"])
    told = extension.get("approximate") or {}
    document = (told["reused"], told["recomputed"]) if told.get("kind") == "blocks" else None
    return Outcome(counts, extension["miss_reason"], entries, document)


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "did not happen in time"
        time.sleep(0.002)


@dataclass
class Machines:
    """Engines on manual clocks that move together; each serves one model, `slots` turns at once."""

    engines: list[Engine]
    slots: int = SLOTS
    _counted: dict[bytes, CountReply] = field(default_factory=dict)

    @property
    def granularity(self) -> int:
        return self.engines[0].description.granularity

    @property
    def keeps_states(self) -> bool:
        return self.engines[0].description.state_blocks > 0

    def advance(self, seconds: float) -> None:
        if not seconds:
            return
        for engine in self.engines:
            engine.advance(seconds)

    def sizes(self, turn: Turn) -> Sizes:
        """Both models count alike: they have one tokenizer and template. Ends as entries sit."""
        counted, floor = self._count(turn.talk.prompt()), self.engines[0].floor
        ends = [floor(end) for end in counted.segment_tokens if end is not None]
        assert len(ends) == len(counted.segment_tokens), "this model leaves a segment no boundary"
        return Sizes(ends, counted.input_tokens - ends[-1])

    def _count(self, asked: Prompt) -> CountReply:
        key = msgspec.json.encode(asked)
        if key not in self._counted:
            self._counted[key] = self.engines[0].count(asked)
        return self._counted[key]

    @contextmanager
    def full(self, model: int) -> Iterator[list[Stream]]:
        """All slots are taken by turns without an end, until they are cancelled."""
        engine = self.engines[model]
        with ExitStack() as stack:
            blockers = []
            for _ in range(self.slots):
                request = engine.request(prompt("wait"), "b" * 32, max_tokens=None, ignore_eos=True)
                blockers.append(stack.enter_context(engine.stream(request)))
                blockers[-1].start()
            yield blockers
            for blocker in blockers:
                engine.cancel(blocker.request_id)

    def clear(self) -> None:
        """Nothing is left of what was played."""
        self._counted.clear()
        for engine in self.engines:
            engine.wait_until_idle(WAIT_SECONDS)
            for scope in {entry.scope for entry in engine.get("entries", list[EntryInfo])}:
                engine.drop(scope)
            engine.acknowledge(*engine.unacknowledged())


@dataclass
class EngineSent:
    stream: Stream
    stack: ExitStack

    def begin(self) -> Outcome:
        return outcome_of(self.stream.start())

    def close(self) -> None:
        self.stack.close()


@dataclass
class ByProtocol:
    """Turns as a gateway would send them."""

    machines: Machines
    num_models: int
    num_scopes: int = 3
    has_tools: bool = True
    checks_marks: bool = False
    has_kinds: bool = False

    def ask(self, turn: Turn) -> Outcome:
        if turn.end == "left":
            sent = self.send(turn)
            outcome = sent.begin()
            sent.close()
            self.machines.engines[turn.model].wait_until_idle(WAIT_SECONDS)
            return outcome
        engine = self.machines.engines[turn.model]
        answer = engine.ask(
            turn.talk.prompt(),
            scope_of(turn),
            *resolved(turn.talk, turn.marks).items(),
            minimum=MINIMUMS[turn.model],
            max_tokens=0 if turn.end == "warm" else 1,
        )
        return outcome_of(answer.started)

    def send(self, turn: Turn) -> EngineSent:
        engine, stack = self.machines.engines[turn.model], ExitStack()
        request = engine.request(
            turn.talk.prompt(),
            scope_of(turn),
            *resolved(turn.talk, turn.marks).items(),
            minimum=MINIMUMS[turn.model],
            max_tokens=None if turn.end == "left" else 1,
            ignore_eos=True,
        )
        return EngineSent(stack.enter_context(engine.stream(request)), stack)

    def cancel(self, turn: Turn, sent: Sent) -> None:
        assert isinstance(sent, EngineSent)
        assert self.machines.engines[turn.model].cancel(sent.stream.request_id)
        sent.close()


def scope_of(turn: Turn) -> str:
    return f"{turn.scope:032x}"


@dataclass
class GatewaySent:
    """`lines` is kept: httpx closes the response of an iterator that nobody has any more."""

    lines: Iterator[str]
    stack: ExitStack

    def begin(self) -> Outcome:
        while not (data := next(self.lines)).startswith("data: "):
            pass
        event = json.loads(data.removeprefix("data: "))
        assert event["type"] == "message_start", event
        return message_outcome(event["message"])

    def close(self) -> None:
        self.stack.close()


@dataclass
class ByGateway:
    """The Messages API; a scope is a key of its own workspace, a model an id of models.toml."""

    machines: Machines
    client: httpx.Client
    keys: list[str]
    models: list[str]
    has_tools: bool = True
    checks_marks: bool = True
    has_kinds: bool = False
    num_models: int = field(init=False)
    num_scopes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_models, self.num_scopes = len(self.models), len(self.keys)

    def ask(self, turn: Turn) -> Outcome:
        if turn.end == "left":
            sent = self.send(turn)
            outcome = sent.begin()
            sent.close()
            self.machines.engines[turn.model].wait_until_idle(WAIT_SECONDS)
            return outcome
        body = self._body(turn, 0 if turn.end == "warm" else 1)
        response = self.client.post("/v1/messages", json=body, headers=self._headers(turn))
        if response.status_code == 400:
            return Outcome(None)
        assert response.status_code == 200, response.text
        message = response.json()
        told = message["holdfast"].get("approximate")
        assert (told is not None) == (turn.keep is not None or turn.document is not None)
        if turn.keep is not None:
            assert told["of"] == self.machines.sizes(turn).ends[turn.keep]
        return message_outcome(message)

    def send(self, turn: Turn) -> GatewaySent:
        stack = ExitStack()
        body = self._body(turn, ENDLESS if turn.end == "left" else 1) | {"stream": True}
        response = stack.enter_context(
            self.client.stream("POST", "/v1/messages", json=body, headers=self._headers(turn))
        )
        assert response.status_code == 200, response.read()
        return GatewaySent(response.iter_lines(), stack)

    def cancel(self, turn: Turn, sent: Sent) -> None:
        engine = self.machines.engines[turn.model]
        waiting = engine.stats().waiting
        sent.close()
        wait_until(lambda: engine.stats().waiting == waiting - 1)

    def _body(self, turn: Turn, max_tokens: int) -> dict[str, Any]:
        body = turn.talk.body(turn.marks, turn.keep, turn.document)
        return {
            **body,
            "model": self.models[turn.model],
            "max_tokens": max_tokens,
            "temperature": 0,
        }

    def _headers(self, turn: Turn) -> dict[str, str]:
        return {"x-api-key": self.keys[turn.scope], "anthropic-version": "2023-06-01"}
