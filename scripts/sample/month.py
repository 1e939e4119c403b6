"""What the sample month's engines hold: entries with TTLs, restarts, and full memory.

A model of an engine's cache at the level of entries, by the rules of the contract. It says for each
turn what it reads, what it writes and why it missed.
"""

import random
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from itertools import accumulate, groupby, pairwise
from pathlib import Path
from typing import Literal

import msgspec

from engine.protocol import (
    TTLS,
    WRITE_FIELDS,
    Breakpoint,
    GenerateRequest,
    InputUsage,
    Message,
    MissReason,
    Prompt,
    Role,
    Sampling,
    TextPart,
    Tool,
    Ttl,
)
from gateway.base.epochs import EpochReport
from gateway.base.record import TurnRecord
from gateway.journal.drain import charge
from gateway.ledger.upkeep import MADE_UP
from gateway.prices.files import PriceBook
from gateway.prices.price import PriceSheets
from gateway.prompt.fingerprint import Fingerprint, digest_parameters, kinds_at, pack, points_of
from gateway.prompt.names import NAMES_RULE, find_prefixes
from gateway.prompt.plan import section_of
from gateway.prompt.sketch import kinds_of, sketch_of
from gateway.structs.usage import TurnMark

Rhythm = Literal["office", "night", "weekend", "always"]


@dataclass(frozen=True, slots=True, kw_only=True)
class App:
    """One application. Lengths are ranges in tokens."""

    workspace: str
    name: str
    model: str
    # Its part of the month's turns.
    share: float
    rhythm: Rhythm
    system_tokens: int
    question: tuple[int, int]
    answer: tuple[int, int]
    # Marks the system prompt. Empty: nothing does.
    system_ttl: Ttl | Literal[""] = "5m"
    # Marks a turn's end.
    turn_ttl: Ttl | None = None
    num_tools: int = 0
    num_prompts: int = 1
    # The turns of a talk, on average. Each sends the earlier ones again.
    talk_turns: int = 1
    # Between two turns of a talk.
    pause_seconds: float = 45.0
    # The prompt begins with the time, so no two prompts are alike.
    stamps: bool = False
    compares: bool = False
    dialect: Literal["anthropic", "openai"] = "anthropic"
    keys: tuple[str, ...] = ("production",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """An engine: its model, its speed, its first day in the month, and its restarts.

    A restart is the day and the hour (UTC) at which the engine ends, and its minutes of downtime.
    """

    name: str
    serves: str
    prefill_tokens_per_second: float
    decode_seconds: float
    first_day: int = 0
    restarts: tuple[tuple[int, float, float], ...] = ()


PRICED_AS = {"general-8b": "reference", "coder-32b": "reference", "general-8b-preview": None}
ENGINE_MODEL = {
    "general-8b": "general-8b",
    "general-8b-preview": "general-8b",
    "coder-32b": "coder-32b",
}

_CAST = tomllib.loads(Path(__file__).with_name("cast.toml").read_text("utf-8"))
MACHINES = msgspec.convert(_CAST["machines"], tuple[Machine, ...])
APPS = msgspec.convert(_CAST["apps"], tuple[App, ...])


DAYS = 30
_HOURS = DAYS * 24
# The shares of a talk's pauses that are short breaks, and that are long ones.
_COFFEE = 0.06
_MEETING = 0.012
_TOKEN_SECONDS = 0.036
_DAY_MS = 86_400_000
_HOUR_MS = 3_600_000


@dataclass(frozen=True, slots=True)
class Arrival:
    """The beginning of a turn."""

    ms: int
    app: App
    prompt: int
    talk: int
    # Its number in the talk, from 0.
    turn: int
    key: str


def arrivals(until: datetime, num_turns: int, chance: random.Random) -> list[Arrival]:
    """About `num_turns` arrivals in the 30 days before `until`, in order of time."""
    first = until - timedelta(days=DAYS)
    last_ms = int(until.timestamp() * 1000)
    hours = [first + timedelta(hours=hour) for hour in range(_HOURS)]
    month_arrivals: list[Arrival] = []
    for app in APPS:
        # The team grows: the last day has a third more turns than the first.
        weights = [weight(app.rhythm, hour) * (1 + n / _HOURS / 3) for n, hour in enumerate(hours)]
        app_arrivals: list[Arrival] = []
        talk = 0
        count = int(num_turns * app.share)
        while len(app_arrivals) < count:
            start = chance.choices(hours, weights)[0] + timedelta(hours=chance.random())
            talk += 1
            turns = talk_of(app, int(start.timestamp() * 1000), talk, chance)
            app_arrivals += [turn for turn in turns if turn.ms < last_ms]
        month_arrivals += app_arrivals[:count]
    return sorted(month_arrivals, key=lambda arrival: (arrival.ms, arrival.app.name, arrival.talk))


def weight(rhythm: Rhythm, moment: datetime) -> float:
    """The traffic of the hour that begins at `moment` (UTC), as a share of the busiest hour's."""
    hour = moment.hour
    is_weekend = moment.weekday() >= 5
    match rhythm:
        case "night":
            return 1.0 if hour in (1, 2, 3) else 0.0
        case "weekend":
            return (1.0 if 9 <= hour < 15 else 0.02) if is_weekend else 0.01
        case "always":
            return (0.7 if is_weekend else 1.0) * (1.0 if 7 <= hour < 22 else 0.35)
        case "office":
            day = {8: 0.5, 12: 0.6, 17: 0.6, 18: 0.3}.get(hour, 1.0 if 9 <= hour < 17 else 0.03)
            return day * (0.12 if is_weekend else 1.0)


def talk_of(app: App, ms: int, talk: int, chance: random.Random) -> Iterator[Arrival]:
    """The turns of one talk, from `ms` on."""
    prompt = min(int(chance.expovariate(2.2 / app.num_prompts)), app.num_prompts - 1)
    key = chance.choice(app.keys)
    length = 1 if app.talk_turns == 1 else 1 + int(chance.expovariate(1 / (app.talk_turns - 1)))
    for turn in range(length):
        yield Arrival(ms, app, prompt, talk, turn, key)
        kind = chance.random()
        if kind < _MEETING:
            pause = chance.uniform(3700, 9000)
        elif kind < _MEETING + _COFFEE:
            pause = chance.uniform(320, 2400)
        else:  # no pause is shorter than the longest answer
            answer = 2.0 + app.answer[1] * _TOKEN_SECONDS
            pause = answer + chance.expovariate(1 / app.pause_seconds)
        ms += int(pause * 1000)


def day_of(ms: int, until: datetime) -> int:
    """The day of the month, from 0, of a moment."""
    first = int(until.timestamp() * 1000) - DAYS * _DAY_MS
    return (ms - first) // _DAY_MS


def version_on(day: int) -> int:
    """How many deployments have changed the system prompts by that day of the month, from 0."""
    return sum(day >= deployed for deployed in _DEPLOYMENTS)


def start_of(until: datetime, day: int, hour: float) -> int:
    """The moment (ms) of an hour (UTC) of one of the month's days."""
    first = (until - timedelta(days=DAYS)).astimezone(UTC)
    midnight = first.replace(hour=0, minute=0, second=0, microsecond=0)
    return int((midnight + timedelta(days=day, hours=hour)).timestamp() * 1000)


LOOKBACK_POSITIONS = 20
MIN_CACHE_TOKENS = 1024
# Beyond so many, entries that ended over two hours ago are forgotten.
_MAX_ENTRIES = 1000
_BYTES_PER_TOKEN = 4
_TOOLS_PART = 0.45
# The lines that stand for a system prompt.
_RULES = 10
# The tokens that a template writes behind the last message.
_SCAFFOLD_TOKENS = 6
# The time that gateway and network add to the engine's own.
_OVERHEAD_SECONDS = 0.004
_QUEUE_SECONDS = 0.09
_TIMEOUT = 0.0012
_GONE = 0.008
_LENGTH = 0.02
_TOOL_USE = 0.6
# Days on which the system prompts changed, so that everything is written anew.
_DEPLOYMENTS = (4, 11, 18, 25)
_ELSEWHERE = 0.02
_INSTANCE = "5a3b1e00"


@dataclass(slots=True)
class SampleEntry:
    """An entry."""

    tokens: int
    ttl: Ttl
    # It is readable in between.
    ready_ms: int
    until_ms: int

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
        # By the epoch's number: when leases ended by TTL, and how many ended with the process.
        self._expired: list[list[int]] = [[] for _ in self._epochs]
        self._broken = [0 for _ in self._epochs]

    def is_up(self, ms: int) -> bool:
        return ms >= self._first_ms and not any(start <= ms < end for start, end in self._downs)

    def epoch_at(self, ms: int) -> str:
        """The engine's epoch at this moment. A new epoch begins with nothing held."""
        number = sum(end <= ms for _, end in self._downs)
        if number != self._epoch:
            stopped_ms, _ = self._downs[self._epoch]
            self._end_leases(self._entries.values(), stopped_ms)
            self._broken[self._epoch] = sum(
                entry.until_ms > stopped_ms for entry in self._entries.values()
            )
            self._epoch = number
            self.lost = {key for key, held in self._entries.items() if held.until_ms > ms}
            self._entries.clear()
        return self._epochs[number]

    def _end_leases(self, entries: Iterable[SampleEntry], ms: int) -> None:
        """Count those that ended by their TTL before this moment."""
        ended = [entry.until_ms for entry in entries if entry.until_ms <= ms]
        self._expired[self._epoch] += ended

    def epoch_reports(self, until_ms: int) -> Iterator[EpochReport]:
        """What a gateway would have put down of the leases, hour by hour. Call it once, when the
        month is over. A lease that outlives the month is in none: it has not ended, and no engine
        that runs holds it."""
        self._end_leases(self._entries.values(), until_ms)
        starts = [self._first_ms, *(end for _, end in self._downs)]
        stops = [*(start for start, _ in self._downs), None]
        for number, epoch in enumerate(self._epochs):
            report = EpochReport(
                engine=self.machine.name,
                epoch=epoch,
                model=self.machine.serves,
                device="",
                kind=MADE_UP,
                first_ms=starts[number],
                heard_ms=starts[number],
            )
            expired = 0
            for _, moments in groupby(sorted(self._expired[number]), lambda ms: ms // _HOUR_MS):
                of_hour = list(moments)
                expired += len(of_hour)
                ended = {"expired": expired}
                yield replace(report, heard_ms=of_hour[-1], granted=expired, ended=ended)
            stopped_ms = stops[number]
            yield replace(
                report,
                heard_ms=until_ms if stopped_ms is None else stopped_ms,
                silent_ms=stopped_ms,
                granted=expired + self._broken[number],
                ended={"expired": expired},
            )

    def read(self, keys: list[str], ms: int) -> tuple[int, str | None]:
        """Refresh the longest live entry at most 20 positions back; return its tokens and key."""
        for key in reversed(keys[-LOOKBACK_POSITIONS - 1 :]):
            held = self._entries.get(key)
            if held is not None and held.ready_ms <= ms < held.until_ms:
                held.refresh(ms)
                return held.tokens, key
        return 0, None

    def holds(self, keys: list[str], ms: int) -> int:
        """Tokens of the deepest of these keys that is held at this moment."""
        live = [self._entries[key] for key in keys if key in self._entries]
        return max((held.tokens for held in live if ms < held.until_ms), default=0)

    def why_missing(self, keys: list[str], ms: int) -> MissReason | None:
        """Why the deepest of these keys that was ever held is gone."""
        held = next((self._entries[key] for key in reversed(keys) if key in self._entries), None)
        if held is None or held.ready_ms <= ms < held.until_ms:
            return None
        return "in_progress_race" if held.ready_ms > ms else "ttl_expired"

    def write(self, mark: MarkedPrefix, ms: int, ready_ms: int) -> None:
        entry = self._entries.get(mark.key)
        if entry is not None and ms < entry.until_ms:
            entry.refresh(ms)
            return
        if entry is not None:
            self._end_leases([entry], ms)
        if len(self._entries) > _MAX_ENTRIES:
            old = ms - 7_200_000
            gone = (entry for key, entry in self._entries.items() if key != mark.key)
            self._end_leases((entry for entry in gone if entry.until_ms < old), ms)
            self._entries = {
                k: entry for k, entry in self._entries.items() if entry.until_ms >= old
            }
        until = ms + TTLS[mark.ttl].seconds * 1000
        self._entries[mark.key] = SampleEntry(mark.tokens, mark.ttl, ready_ms, until)


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
        self.num_tools = app.num_tools
        self._arrival = arrival
        self._scope = scope
        self._prompt = Prompt(
            messages=[Message(role, [TextPart(text)]) for role, text, _ in said],
            tools=tools,
            system=[TextPart(f"{stamp}{rules}")],
        )
        sizes = [tool_tokens] * len(tools) + [max(system, 400)] + [message[2] for message in said]
        self.lengths = list(accumulate(sizes))
        self._prefixes = find_prefixes(self._prompt, scope)
        self.keys = [prefix.name.digest for prefix in self._prefixes]
        self.tokens = self.lengths[-1] + _SCAFFOLD_TOKENS
        ends = [(app.num_tools, app.system_ttl), (-1, app.turn_ttl)]
        self.marks = [
            MarkedPrefix(self.keys[end], self.lengths[end], ttl) for end, ttl in ends if ttl
        ]

    def request(self, request_id: str, scope: str, max_tokens: int) -> GenerateRequest:
        """The same for an engine: its texts are as long as they are said to be. `scope` is the
        workspace's with that engine."""
        prompt = self._prompt
        num_tools = len(prompt.tools)
        sizes = [end - begin for begin, end in pairwise([0, *self.lengths])]
        segments = {prefix.name.digest: prefix.name.segment for prefix in self._prefixes}
        tools = zip(prompt.tools, sizes[:num_tools], strict=True)
        messages = zip(prompt.messages, sizes[num_tools + 1 :], strict=True)
        return GenerateRequest(
            request_id=request_id,
            scope=scope,
            prompt=Prompt(
                tools=[_sized_tool(tool, size) for tool, size in tools],
                system=[_sized(prompt.system[0], sizes[num_tools])],
                messages=[
                    Message(message.role, [_sized(part, size)])
                    for message, size in messages
                    for part in message.parts
                    if isinstance(part, TextPart)
                ],
            ),
            sampling=Sampling(max_tokens=max_tokens, temperature=0),
            breakpoints=[Breakpoint(segments[mark.key], mark.ttl) for mark in self.marks],
            names=[prefix.name for prefix in self._prefixes],
        )

    def fingerprint(self) -> bytes:
        app = self._arrival.app
        prompt = self._prompt
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


def _sized(part: TextPart, num_tokens: int) -> TextPart:
    return TextPart(part.text.ljust(num_tokens * _BYTES_PER_TOKEN, "."))


def _sized_tool(tool: Tool, num_tokens: int) -> Tool:
    bare = len(msgspec.json.encode(msgspec.structs.replace(tool, description="")))
    described = "." * (num_tokens * _BYTES_PER_TOKEN - bare)
    return msgspec.structs.replace(tool, description=described)


def serve(
    record: TurnRecord,
    arrival: Arrival,
    prompt: SamplePrompt,
    place: SampleCache,
    chance: random.Random,
) -> None:
    """Fill in the counts that the engine would have sent, and why the turn missed."""
    ms = arrival.ms
    record.engine = place.machine.name
    record.epoch = place.epoch_at(ms)
    if chance.random() < _TIMEOUT:
        record.outcome = "timeout_error"
        record.duration_seconds = 16.0 + chance.random()
        return
    marks = [mark for mark in prompt.marks if mark.tokens >= MIN_CACHE_TOKENS]
    read, key = _last_read(prompt, marks, place, ms)
    record.miss_reason = _miss_reason(prompt, marks, key, place, ms)
    record.marks = [_told_of(mark, prompt, key, place, ms) for mark in prompt.marks]
    is_there = _is_in_memory(record.miss_reason, chance)
    automatic = max(prompt.lengths[arrival.app.num_tools] - read, 0) if is_there else 0
    computed = prompt.tokens - read - automatic
    record.take_usage(_usage_of(prompt, marks, read, automatic))
    first = _time_prefill(record, computed, place, ms, chance)
    _end_answer(record, arrival, first, place, chance)
    for mark in marks:
        place.write(mark, ms, ms + int(first * 1000))


def _last_read(
    prompt: SamplePrompt, marks: Sequence[MarkedPrefix], place: SampleCache, ms: int
) -> tuple[int, str | None]:
    """Tokens and key of the entry that is read: at a mark's position, or up to 20 before it."""
    read = 0
    for mark in reversed(marks):
        read, key = place.read(prompt.keys[: prompt.keys.index(mark.key) + 1], ms)
        if key is not None:
            return read, key
    return read, None


def _miss_reason(
    prompt: SamplePrompt,
    marks: Sequence[MarkedPrefix],
    key: str | None,
    place: SampleCache,
    ms: int,
) -> str | None:
    """Why the last mark was not read; None where it was. `key` is that of the entry read."""
    if not prompt.marks:
        return "no_breakpoint"
    if not marks:
        return "below_minimum"
    if key == marks[-1].key:
        return None
    keys = prompt.keys
    reason = place.why_missing(keys[keys.index(key) + 1 :] if key else keys, ms)
    if reason is None and key is None:
        return "engine_restart" if place.lost.intersection(keys) else "cold"
    return reason


def _told_of(
    mark: MarkedPrefix, prompt: SamplePrompt, key: str | None, place: SampleCache, ms: int
) -> TurnMark:
    """What became of a mark. `key` is that of the entry read."""
    keys = prompt.keys
    segment = keys.index(mark.key)
    section, block = section_of(segment, prompt.num_tools, 1)
    unread = keys[: segment + 1] if key is None else keys[keys.index(key) + 1 : segment + 1]
    missed: str | None = None
    if unread and mark.tokens < MIN_CACHE_TOKENS:
        missed = "below_minimum"
    elif unread:
        missed = place.why_missing(unread, ms)
        if missed is None and key is not None:
            missed = "grew"
        elif missed is None:
            missed = "engine_restart" if place.lost.intersection(unread) else "cold"
    return TurnMark(section=section, block=block, tokens=mark.tokens, ttl=mark.ttl, missed=missed)


def _is_in_memory(reason: str | None, chance: random.Random) -> bool:
    """Whether unmarked content is there: another turn computes it, or it is left by luck."""
    if reason == "in_progress_race":
        return True
    return reason == "no_breakpoint" and chance.random() < 0.7


def _usage_of(
    prompt: SamplePrompt, marks: Sequence[MarkedPrefix], read: int, automatic: int
) -> InputUsage:
    writes = dict.fromkeys(TTLS, 0)
    position = read
    for mark in marks:
        writes[mark.ttl] += max(mark.tokens - position, 0)
        position = max(mark.tokens, position)
    return InputUsage(
        input_tokens=prompt.tokens - position,
        cache_read_tokens=read,
        automatic_tokens=automatic,
        computed_tokens=prompt.tokens - read - automatic,
        **{WRITE_FIELDS[ttl]: tokens for ttl, tokens in writes.items()},
    )


def _time_prefill(
    record: TurnRecord, computed: int, place: SampleCache, ms: int, chance: random.Random
) -> float:
    """Seconds until the first token. The queue goes by the hour's traffic, the prefill by the
    computed tokens."""
    busy = weight("office", datetime.fromtimestamp(ms / 1000, UTC))
    record.queue_seconds = chance.expovariate(1 / (0.001 + _QUEUE_SECONDS * busy**2))
    rate = place.machine.prefill_tokens_per_second
    record.prefill_seconds = 0.008 + computed / rate * chance.uniform(0.92, 1.2)
    overhead = _OVERHEAD_SECONDS + chance.expovariate(1 / 0.002)
    first = record.queue_seconds + record.prefill_seconds + overhead
    record.first_token_seconds = first
    return first


def _end_answer(
    record: TurnRecord, arrival: Arrival, first: float, place: SampleCache, chance: random.Random
) -> None:
    """How the answer ends, how long it is and how long it takes behind its first token."""
    output = chance.randint(*arrival.app.answer)
    fate = chance.random()
    if fate < _GONE:
        record.outcome = "client_disconnect"
        record.stop_reason = "cancelled"
        output = int(output * chance.random())
    elif fate < _GONE + _LENGTH:
        record.outcome = "length"
        record.stop_reason = "length"
    else:
        has_called = arrival.app.num_tools > 0 and chance.random() < _TOOL_USE
        reason = "tool_use" if has_called else "stop"
        record.outcome = reason
        record.stop_reason = reason
    record.output_tokens = output
    record.decode_seconds = output * place.machine.decode_seconds * chance.uniform(0.9, 1.5)
    record.duration_seconds = first + record.decode_seconds


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
    _engines: list[SampleCache] = field(default_factory=list)

    def records(self) -> Iterator[TurnRecord]:
        """In order of time."""
        chance = random.Random(self.seed)
        self._engines = [SampleCache(machine, self.until, chance) for machine in MACHINES]
        for arrival in arrivals(self.until, self.num_turns, chance):
            yield self._record(arrival, self._engines, chance)

    def epoch_reports(self) -> Iterator[EpochReport]:
        """What became of the leases of the turns that `records` gave, which are all needed."""
        until_ms = int(self.until.timestamp() * 1000)
        for engine in self._engines:
            yield from engine.epoch_reports(until_ms)

    def _record(
        self, arrival: Arrival, engines: list[SampleCache], chance: random.Random
    ) -> TurnRecord:
        app = arrival.app
        ms = arrival.ms
        scope = scope_of(arrival.app.workspace)
        turn = f"{arrival.talk}.{arrival.turn}"
        talk = self._talks.setdefault((app.name, arrival.talk), [])
        talk.append(("user", f"question {turn}", chance.randint(*app.question)))
        version = version_on(day_of(ms, self.until))
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
            record.outcome = "overloaded_error"
            record.duration_seconds = 0.002
        else:
            held = {
                engine.machine.name: engine.holds(prompt.keys, ms)
                for engine in engines
                if engine.is_up(ms) and engine.epoch_at(ms)
            }
            serve(record, arrival, prompt, place, chance)
            machine_entries = held[place.machine.name]
            most = max(held.values())
            # As the gateway does: only where the engine knows no better reason.
            if record.miss_reason == "cold" and most > machine_entries:
                record.miss_reason = "routed_elsewhere"
                record.marks = [
                    msgspec.structs.replace(mark, missed="routed_elsewhere")
                    if mark.missed == "cold"
                    else mark
                    for mark in record.marks or ()
                ]
            if record.first_token_seconds is not None:
                record.available_tokens = most
                record.captured_tokens = machine_entries
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
        app = arrival.app
        ms = arrival.ms
        model = ENGINE_MODEL[arrival.app.model]
        up = [cache for cache in engines if cache.machine.serves == model and cache.is_up(ms)]
        if not up:
            return None
        holder = max(up, key=lambda engine: engine.holds(prompt.keys, ms))
        if arrival.turn == 0 or not holder.holds(prompt.keys, ms):
            # Talks are spread over the engines; so are the prompts of applications without talks.
            holder = up[(arrival.talk if app.talk_turns > 1 else arrival.prompt) % len(up)]
        return holder if chance.random() > _ELSEWHERE else chance.choice(up)
