"""What the sequences are played on: engines by their protocol, or a gateway before them by HTTP."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import httpx
import msgspec

from engine.protocol import (
    BreakpointReport,
    CountReply,
    EntryState,
    GenerateRequest,
    Prompt,
    Started,
    Ttl,
)
from engine.protocol.reports import EntryInfo
from scripts.bench.load import headers_of
from tests.conformance.engines import Engine, Stream, prompt
from tests.fuzz.sequence import Turn
from tests.fuzz.talks import resolved
from tests.gateway.serving import eventually

SLOTS = 2
GATEWAY_SLOTS = 4
"""So many, and one more, the gateway sends to an engine; beyond that they would wait there."""
MINIMUMS = (32, 48)
ENDLESS = 100_000


class Sizes(NamedTuple):
    """`ends` of the segments, in tokens; `tail` is what is rendered behind the last."""

    ends: list[int]
    tail: int


class Outcome(NamedTuple):
    """`usage` is (input, read, 5m writes, 1h writes), None where the turn was refused.

    `entries`: what the server says of each breakpoint's entry, in the prompt's order, and `missed`
    why what stands up to it was not read. `document`: how many of its tokens were copied, and how
    many computed where it stands.
    """

    usage: tuple[int, int, int, int] | None
    miss_reason: str | None = None
    entries: tuple[tuple[Ttl | None, EntryState], ...] = ()
    document: tuple[int, int] | None = None
    missed: tuple[str | None, ...] = ()


@dataclass
class Sent:
    """A turn at an engine, whose response has not been read yet; `begin` waits for its first event.

    `close` breaks it off, or ends what is over.
    """

    begin: Callable[[], Outcome]
    close: Callable[[], None]
    request_id: str = ""


def outcome_of(started: Started) -> Outcome:
    usage = started.usage
    counts = (
        usage.input_tokens,
        usage.cache_read_tokens,
        usage.cache_write_5m_tokens,
        usage.cache_write_1h_tokens,
    )
    entries = tuple((report.ttl, report.state) for report in started.breakpoints)
    missed = tuple(told_of(report) for report in started.breakpoints)
    return Outcome(counts, started.miss_reason, entries, missed=missed)


def told_of(report: BreakpointReport) -> str | None:
    assert not isinstance(report.missed, msgspec.UnsetType), "engines tell of each breakpoint"
    return report.missed


def message_outcome(message: dict[str, Any]) -> Outcome:
    """Of an answer of the Messages API; its counters must agree with each other."""
    usage = message["usage"]
    extension = message["holdfast"]
    created = usage["cache_creation"]
    short = created["ephemeral_5m_input_tokens"]
    long = created["ephemeral_1h_input_tokens"]
    assert usage["cache_creation_input_tokens"] == short + long
    counts = (usage["input_tokens"], usage["cache_read_input_tokens"], short, long)
    entries = tuple((point.get("ttl"), point["state"]) for point in extension["breakpoints"])
    approximation = extension.get("approximate") or {}
    document = (
        (approximation["reused"], approximation["recomputed"])
        if approximation.get("kind") == "blocks"
        else None
    )
    missed = tuple(point["missed"] for point in extension["breakpoints"])
    return Outcome(counts, extension["miss_reason"], entries, document, missed)


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
        counted = self._count(turn.talk.prompt())
        floor = self.engines[0].floor
        ends = [floor(end) for end in counted.segment_tokens if end is not None]
        assert len(ends) == len(counted.segment_tokens), "this model leaves a segment no boundary"
        return Sizes(ends, counted.input_tokens - ends[-1])

    def _count(self, prompt: Prompt) -> CountReply:
        key = msgspec.json.encode(prompt)
        if key not in self._counted:
            self._counted[key] = self.engines[0].count(prompt)
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
            engine.wait_until_idle()
            for scope in {entry.scope for entry in engine.get("entries", list[EntryInfo])}:
                engine.drop(scope)
            engine.acknowledge(*engine.unacknowledged())


@dataclass
class Server:
    """`checks_marks`: broken rules of markers are refused, not undefined. `has_kinds`: its engines
    compress prefixes, and its workspaces may ask for it."""

    machines: Machines
    num_models: int
    num_scopes: int = 3
    has_tools: bool = True
    checks_marks: bool = False
    has_kinds: bool = False

    def ask(self, turn: Turn) -> Outcome:
        if turn.end != "left":
            return self.whole(turn)
        sent = self.send(turn)
        outcome = sent.begin()
        sent.close()
        self.machines.engines[turn.model].wait_until_idle()
        return outcome

    def whole(self, turn: Turn) -> Outcome:
        """Read to its end."""
        raise NotImplementedError

    def send(self, turn: Turn) -> Sent:
        raise NotImplementedError

    def cancel(self, turn: Turn, sent: Sent) -> None:
        """End it before its first event; what it held is free when this returns."""
        raise NotImplementedError


class ByProtocol(Server):
    """Turns as a gateway would send them."""

    def whole(self, turn: Turn) -> Outcome:
        with self.machines.engines[turn.model].stream(self._request(turn)) as stream:
            outcome = outcome_of(stream.start())
            stream.rest()
        return outcome

    def send(self, turn: Turn) -> Sent:
        stack = ExitStack()
        request = self._request(turn)
        stream = stack.enter_context(self.machines.engines[turn.model].stream(request))
        return Sent(lambda: outcome_of(stream.start()), stack.close, stream.request_id)

    def cancel(self, turn: Turn, sent: Sent) -> None:
        assert self.machines.engines[turn.model].cancel(sent.request_id)
        sent.close()

    def _request(self, turn: Turn) -> GenerateRequest:
        return self.machines.engines[turn.model].request(
            turn.talk.prompt(),
            f"{turn.scope:032x}",
            *resolved(turn.talk, turn.marks).items(),
            minimum=MINIMUMS[turn.model],
            max_tokens={"left": None, "warm": 0}.get(turn.end, 1),
            ignore_eos=turn.end != "warm",
        )


class ByGateway(Server):
    """The Messages API; a scope is a key of its own workspace, a model an id of models.toml."""

    def __init__(
        self, machines: Machines, client: httpx.Client, keys: list[str], models: list[str]
    ) -> None:
        super().__init__(machines, len(models), len(keys), checks_marks=True)
        self._client = client
        self._keys = keys
        self._models = models

    def whole(self, turn: Turn) -> Outcome:
        response = self._client.post("/v1/messages", **self._asked(turn))
        if response.status_code == 400:
            return Outcome(None)
        assert response.status_code == 200, response.text
        message = response.json()
        approximation = message["holdfast"].get("approximate")
        assert (approximation is not None) == (turn.keep is not None or turn.document is not None)
        if turn.keep is not None:
            assert approximation["of"] == self.machines.sizes(turn).ends[turn.keep]
        return message_outcome(message)

    def send(self, turn: Turn) -> Sent:
        stack = ExitStack()
        response = stack.enter_context(
            self._client.stream("POST", "/v1/messages", **self._asked(turn, stream=True))
        )
        assert response.status_code == 200, response.read()
        # Kept: httpx closes the response of an iterator that nobody has any more.
        lines = response.iter_lines()

        def begin() -> Outcome:
            while not (data := next(lines)).startswith("data: "):
                pass
            event = json.loads(data.removeprefix("data: "))
            assert event["type"] == "message_start", event
            return message_outcome(event["message"])

        return Sent(begin, stack.close)

    def cancel(self, turn: Turn, sent: Sent) -> None:
        engine = self.machines.engines[turn.model]
        waiting = engine.stats().waiting
        sent.close()
        eventually(lambda: engine.stats().waiting == waiting - 1)

    def _asked(self, turn: Turn, *, stream: bool = False) -> dict[str, Any]:
        """The body, and the headers."""
        body = turn.talk.body(turn.marks, turn.keep, turn.document)
        body |= {"model": self._models[turn.model], "temperature": 0, "stream": stream}
        body["max_tokens"] = {"left": ENDLESS, "warm": 0}.get(turn.end, 1)
        return {"json": body, "headers": headers_of(self._keys[turn.scope])}
