"""What the sample month's engines hold: entries with TTLs, restarts, and full memory.

A model of an engine's cache at the level of entries, by the rules of the contract. It says for each
turn what it reads, what it writes and why it missed.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import accumulate, pairwise

import msgspec

from engine.protocol import (
    TTLS,
    WRITE_FIELDS,
    InputUsage,
    Message,
    MissReason,
    Prompt,
    Role,
    TextPart,
    Tool,
    Ttl,
)
from gateway.base.record import TurnRecord
from gateway.journal.drain import charge
from gateway.prices.files import PriceBook
from gateway.prices.price import PriceSheets
from gateway.prompt.fingerprint import Fingerprint, digest_parameters, kinds_at, pack, points_of
from gateway.prompt.names import NAMES_RULE, find_prefixes
from gateway.prompt.sketch import kinds_of, sketch_of
from scripts.sample.cast import (
    ENGINE_MODEL,
    MACHINES,
    PRICED_AS,
    Arrival,
    Machine,
    arrivals,
    day_of,
    start_of,
    weight,
)

LOOKBACK_POSITIONS = 20
MIN_CACHE_TOKENS = 1024
# The number of entries in an engine's lease budget. A further entry is best-effort.
_LEASED_ENTRIES = 260
_BEST_EFFORT_SECONDS = (40.0, 400.0)
_BYTES_PER_TOKEN = 4
_TOOLS_PART = 0.45
_SUMMARY_TOKENS = 900
# The lines that stand for a system prompt.
_RULES = 10
# The tokens that a template writes behind the last message.
_SCAFFOLD_TOKENS = 6
# The time that gateway and network add to the engine's own.
_OVERHEAD_SECONDS = 0.004
_QUEUE_SECONDS = 0.09
_TIMEOUT, _GONE, _LENGTH, _TOOL_USE = 0.0012, 0.008, 0.02, 0.6
# Days on which the system prompts changed, so that everything is written anew.
_DEPLOYMENTS = (4, 11, 18, 25)
_ELSEWHERE = 0.02
_INSTANCE = "5a3b1e00"


@dataclass(slots=True)
class SampleEntry:
    """An entry, readable from `ready_ms` until the earlier of `until_ms` and `evicted_ms`."""

    tokens: int
    ttl: Ttl
    ready_ms: int
    until_ms: int
    evicted_ms: int | None

    def why_gone(self, ms: int) -> MissReason | None:
        if self.evicted_ms is not None and self.evicted_ms <= min(ms, self.until_ms):
            return "best_effort_evicted"
        return "ttl_expired" if self.until_ms <= ms else None

    def refresh(self, ms: int) -> None:
        self.until_ms = max(self.until_ms, ms + TTLS[self.ttl].seconds * 1000)


@dataclass(frozen=True, slots=True)
class MarkedPrefix:
    """A marked prefix: its name, its length in tokens, and the TTL that it was marked with."""

    key: str
    tokens: int
    ttl: Ttl


class SampleCache:
    """One engine over the month. `downs` are its downtimes, as ranges in ms."""

    def __init__(self, machine: Machine, until: datetime, chance: random.Random) -> None:
        starts = [(start_of(until, day, hour), mins) for day, hour, mins in machine.restarts]
        self.machine = machine
        self.lost: set[str] = set()
        self._first_ms = start_of(until, machine.first_day, 0)
        self._downs = [(start, start + int(minutes * 60_000)) for start, minutes in starts]
        self._epochs = [f"{chance.getrandbits(128):032x}" for _ in range(len(starts) + 1)]
        self._epoch = 0
        self._entries: dict[str, SampleEntry] = {}

    def is_up(self, ms: int) -> bool:
        return ms >= self._first_ms and not any(start <= ms < end for start, end in self._downs)

    def goes_down_within(self, ms: int, duration_ms: int) -> bool:
        return any(ms < start <= ms + duration_ms for start, _ in self._downs)

    def epoch_at(self, ms: int) -> str:
        """The engine's epoch at this moment. A new epoch begins with nothing held."""
        number = sum(end <= ms for _, end in self._downs)
        if number != self._epoch:
            self._epoch = number
            self.lost = {key for key, held in self._entries.items() if held.until_ms > ms}
            self._entries.clear()
        return self._epochs[number]

    def read(self, keys: list[str], ms: int) -> tuple[int, str | None]:
        """Refresh the longest live entry at most 20 positions back; return its tokens and key."""
        for key in reversed(keys[-LOOKBACK_POSITIONS - 1 :]):
            held = self._entries.get(key)
            if held is not None and held.ready_ms <= ms and held.why_gone(ms) is None:
                held.refresh(ms)
                return held.tokens, key
        return 0, None

    def holds(self, keys: list[str], ms: int) -> int:
        """Tokens of the deepest of these keys that is held at this moment."""
        live = [self._entries[key] for key in keys if key in self._entries]
        return max((held.tokens for held in live if held.why_gone(ms) is None), default=0)

    def why_missing(self, keys: list[str], ms: int) -> MissReason | None:
        """Why the deepest of these keys that was ever held is gone."""
        held = next((self._entries[key] for key in reversed(keys) if key in self._entries), None)
        if held is None:
            return None
        return "in_progress_race" if held.ready_ms > ms else held.why_gone(ms)

    def write(self, mark: MarkedPrefix, ms: int, ready_ms: int, chance: random.Random) -> None:
        known = self._entries.get(mark.key)
        if known is not None and known.why_gone(ms) is None:
            known.refresh(ms)
            return
        held = self._entries.values()
        if len(held) > 4 * _LEASED_ENTRIES:  # what ended over two hours ago is forgotten
            kept = {k: one for k, one in self._entries.items() if one.until_ms >= ms - 7_200_000}
            self._entries, held = kept, kept.values()
        evicted, leased = None, len(held)
        if leased > _LEASED_ENTRIES:
            leased = sum(one.evicted_ms is None and one.until_ms > ms for one in held)
        if leased > _LEASED_ENTRIES:
            evicted = ms + int(chance.uniform(*_BEST_EFFORT_SECONDS) * 1000)
        until = ms + TTLS[mark.ttl].seconds * 1000
        self._entries[mark.key] = SampleEntry(mark.tokens, mark.ttl, ready_ms, until, evicted)


class SamplePrompt:
    """A prompt as the gateway sees it.

    `keys` are the names at its segment ends, `lengths` the tokens there, `marks` the breakpoints.
    """

    def __init__(
        self, arrival: Arrival, said: list[tuple[Role, str, int]], version: int, scope: str
    ) -> None:
        """`version` counts the deployments that changed the system prompt."""
        app = arrival.app
        rules = "\n".join(f"{app.name} {arrival.prompt}.{version} rule {n}" for n in range(_RULES))
        stamp = f"now {arrival.ms}\n" if app.stamps else ""
        tools = [Tool(f"{app.name}_{number}", {}) for number in range(app.num_tools)]
        tool_tokens = int(app.system_tokens * _TOOLS_PART / app.num_tools) if tools else 0
        system = app.system_tokens * (1 + arrival.prompt % 5) // 3 - tool_tokens * app.num_tools
        self._arrival, self._scope = arrival, scope
        self._prompt = Prompt(
            messages=[Message(role, [TextPart(text)]) for role, text, _ in said],
            tools=tools,
            system=[TextPart(f"{stamp}{rules}")],
        )
        sizes = [tool_tokens] * len(tools) + [max(system, 400)] + [each[2] for each in said]
        self.lengths = list(accumulate(sizes))
        self._prefixes = find_prefixes(self._prompt, scope)
        self.keys = [prefix.name.digest for prefix in self._prefixes]
        self.tokens = self.lengths[-1] + _SCAFFOLD_TOKENS
        ends = [(app.num_tools, app.system_ttl), (-1, app.turn_ttl)]
        self.marks = [
            MarkedPrefix(self.keys[end], self.lengths[end], ttl) for end, ttl in ends if ttl
        ]

    def fingerprint(self) -> bytes:
        app, prompt = self._arrival.app, self._prompt
        points = points_of(
            [
                prefix._replace(num_bytes=tokens * _BYTES_PER_TOKEN)
                for prefix, tokens in zip(self._prefixes, self.lengths, strict=True)
            ]
        )
        segments = {prefix.name.digest: prefix.name.segment for prefix in self._prefixes}
        sketch = sketch_of(prompt, self._scope)
        sizes = [after - before for before, after in pairwise([0, *self.lengths])]
        sketched = [size * _BYTES_PER_TOKEN for size in sizes[: len(sketch.sizes)]]
        return pack(
            Fingerprint(
                model=app.model,
                parameters=digest_parameters(b"", self._scope),
                num_tools=len(prompt.tools),
                num_system=len(prompt.system),
                points=points,
                num_tokens=self.tokens,
                is_shared=app.compares,
                tokens=self.lengths,
                kinds=kinds_at(points, kinds_of(prompt)),
                marks=[(segments[mark.key], mark.ttl) for mark in self.marks],
                sketch=msgspec.structs.replace(sketch, sizes=sketched),
                rule=NAMES_RULE,
            )
        )


def serve(
    record: TurnRecord,
    arrival: Arrival,
    prompt: SamplePrompt,
    place: SampleCache,
    chance: random.Random,
) -> None:
    """Fill in the counts that the engine would have sent, and why the turn missed."""
    ms = arrival.ms
    record.engine, record.epoch = place.machine.name, place.epoch_at(ms)
    if chance.random() < _TIMEOUT:
        record.outcome, record.duration_seconds = "timeout_error", 16.0 + chance.random()
        return
    marks = [mark for mark in prompt.marks if mark.tokens >= MIN_CACHE_TOKENS]
    read, key, keys = 0, None, prompt.keys
    for mark in reversed(marks):  # at its position, or up to 20 positions back
        read, key = place.read(keys[: keys.index(mark.key) + 1], ms)
        if key is not None:
            break
    reason: str | None = None
    if not prompt.marks:
        reason = "no_breakpoint"
    elif not marks:
        reason = "below_minimum"
    elif key != marks[-1].key:
        reason = place.why_missing(keys[keys.index(key) + 1 :] if key else keys, ms)
        if reason is None and key is None:
            reason = "engine_restart" if place.lost.intersection(keys) else "cold"
    record.miss_reason = reason
    # Unmarked reuse: of content that another turn computes, or that happens to be in memory.
    is_there = reason == "in_progress_race"
    is_there |= reason == "no_breakpoint" and chance.random() < 0.7
    automatic = max(prompt.lengths[arrival.app.num_tools] - read, 0) if is_there else 0
    writes, position = dict.fromkeys(TTLS, 0), read
    for mark in marks:
        writes[mark.ttl] += max(mark.tokens - position, 0)
        position = max(mark.tokens, position)
    computed = prompt.tokens - read - automatic
    usage = InputUsage(
        input_tokens=prompt.tokens - position,
        cache_read_tokens=read,
        automatic_tokens=automatic,
        computed_tokens=computed,
        **{WRITE_FIELDS[ttl]: tokens for ttl, tokens in writes.items()},
    )
    record.take_usage(usage)
    # The queue goes by the hour's traffic, the prefill by the computed tokens.
    busy = weight("office", datetime.fromtimestamp(ms / 1000, UTC))
    record.queue_seconds = chance.expovariate(1 / (0.001 + _QUEUE_SECONDS * busy**2))
    rate = place.machine.prefill_tokens_per_second
    record.prefill_seconds = 0.008 + computed / rate * chance.uniform(0.92, 1.2)
    overhead = _OVERHEAD_SECONDS + chance.expovariate(1 / 0.002)
    first = record.queue_seconds + record.prefill_seconds + overhead
    record.first_token_seconds = first
    output, fate = chance.randint(*arrival.app.answer), chance.random()
    if fate < _GONE:
        record.outcome, record.stop_reason = "client_disconnect", "cancelled"
        output = int(output * chance.random())
    elif fate < _GONE + _LENGTH:
        record.outcome = record.stop_reason = "length"
    else:
        calls = arrival.app.num_tools > 0 and chance.random() < _TOOL_USE
        record.outcome = record.stop_reason = "tool_use" if calls else "stop"
    record.output_tokens = output
    record.decode_seconds = output * place.machine.decode_seconds * chance.uniform(0.9, 1.5)
    record.duration_seconds = first + record.decode_seconds
    if place.goes_down_within(ms, int(record.duration_seconds * 1000)):
        record.outcome, record.stop_reason, record.output_tokens = "api_error", None, 0
    for mark in marks:
        place.write(mark, ms, ms + int(first * 1000), chance)


def scope_of(workspace: str) -> str:
    """A scope that no installation's secret gives: it is for sample data only."""
    return f"{random.Random(workspace).getrandbits(128):032x}"


def key_id_of(workspace: str, name: str) -> str:
    return f"key_{random.Random(f'{workspace}/{name}').getrandbits(64):016x}"


@dataclass(slots=True)
class Month:
    """About `num_turns` turns of the 30 days before `until` (aware UTC). Iterate once."""

    until: datetime
    num_turns: int
    seed: int
    prices: PriceSheets | PriceBook
    _talks: dict[tuple[str, int], list[tuple[Role, str, int]]] = field(default_factory=dict)
    """What was said so far: role, stand-in text and tokens."""

    def records(self) -> Iterator[TurnRecord]:
        """In order of time."""
        chance = random.Random(self.seed)
        engines = [SampleCache(machine, self.until, chance) for machine in MACHINES]
        for arrival in arrivals(self.until, self.num_turns, chance):
            yield self._record(arrival, engines, chance)

    def _record(
        self, arrival: Arrival, engines: list[SampleCache], chance: random.Random
    ) -> TurnRecord:
        app, ms, scope = arrival.app, arrival.ms, scope_of(arrival.app.workspace)
        turn = f"{arrival.talk}.{arrival.turn}"
        talk = self._talks.setdefault((app.name, arrival.talk), [])
        if arrival.is_compacted:
            talk[:] = [("user", f"summary {turn}", _SUMMARY_TOKENS), ("assistant", "understood", 4)]
        talk.append(("user", f"question {turn}", chance.randint(*app.question)))
        version = sum(day_of(ms, self.until) >= day for day in _DEPLOYMENTS)
        prompt = SamplePrompt(arrival, talk, version, scope)
        record = TurnRecord(
            id=f"msg_{_INSTANCE}{chance.getrandbits(80):020x}",
            instance=_INSTANCE,
            workspace=app.workspace,
            key_id=key_id_of(app.workspace, arrival.key),
            model=app.model,
            stream=app.rhythm != "night",
            opened_at=datetime.fromtimestamp(ms / 1000, UTC),
            engine_model=ENGINE_MODEL[app.model],
            dialect=app.dialect,
            prefix=prompt.marks[-1].key if prompt.marks else None,
            prefix_ttl=prompt.marks[-1].ttl if prompt.marks else None,
            fingerprint=prompt.fingerprint(),
        )
        place = self._route(arrival, prompt, engines, chance)
        if place is None:
            record.outcome, record.duration_seconds = "overloaded_error", 0.002
        else:
            held = {
                engine.machine.name: engine.holds(prompt.keys, ms)
                for engine in engines
                if engine.is_up(ms) and engine.epoch_at(ms)
            }
            serve(record, arrival, prompt, place, chance)
            own, most = held[place.machine.name], max(held.values())
            # As the gateway does: only where the engine knows no better reason.
            if record.miss_reason == "cold" and most > own:
                record.miss_reason = "routed_elsewhere"
            elif record.miss_reason == "cold" and arrival.is_compacted:
                record.miss_reason = "messages_changed"
            if record.first_token_seconds is not None:
                record.available_tokens, record.captured_tokens = most, own
            talk.append(("assistant", f"answer {turn}", record.output_tokens))
        priced_as = PRICED_AS[app.model]
        if priced_as is not None:
            charge(record, self.prices.find(priced_as, record.opened_at.date()))
        return record

    def _route(
        self,
        arrival: Arrival,
        prompt: SamplePrompt,
        engines: list[SampleCache],
        chance: random.Random,
    ) -> SampleCache | None:
        """Mostly the engine that holds most of the prompt; None while no engine is up."""
        app, ms, wanted = arrival.app, arrival.ms, ENGINE_MODEL[arrival.app.model]
        up = [one for one in engines if one.machine.serves == wanted and one.is_up(ms)]
        if not up:
            return None
        holder = max(up, key=lambda engine: engine.holds(prompt.keys, ms))
        if arrival.turn == 0 or not holder.holds(prompt.keys, ms):
            # Talks are spread over the engines; so are the prompts of applications without talks.
            holder = up[(arrival.talk if app.talk_turns > 1 else arrival.prompt) % len(up)]
        return holder if chance.random() > _ELSEWHERE else chance.choice(up)
