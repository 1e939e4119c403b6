"""Turns as the simulation needs them: where prompts are equal, how long they are, when they came.

No content. A turn's prefixes have numbers: equal numbers are equal prefixes.
"""

import random
import tomllib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec

from engine.protocol import Ttl
from gateway.base.errors import InvalidRequest
from gateway.structs.advice import Gpu

FAMILIES = Path(__file__).parent / "families.toml"
"""The shapes of common models."""
GPUS = Path(__file__).parent / "gpus.toml"
MAX_TURNS = 100_000
DEFAULT_MIN_TOKENS = 1024
"""Of engines whose setting says nothing else."""
MAX_TRACE_CHARACTERS = 8 * 2**20
MAX_ENGINES = 64
MAX_MADE_TURNS = 60_000
KvDtype = Literal["float32", "bfloat16", "float16", "fp8", "int8"]
DTYPES: tuple[KvDtype, ...] = ("bfloat16", "float16", "float32", "fp8", "int8")
# PostgreSQL takes no NUL.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[^\x00]+$")]
_Ms = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]
_Gib = Annotated[float, msgspec.Meta(ge=0, le=1_048_576)]
_Count = Annotated[int, msgspec.Meta(ge=1, le=10_000)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class MadeTraffic(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Conversations made up by a rule: tenants with a system prompt each, and gaps between turns.
    All conversations of a tenant begin with its `system_tokens`. Every turn adds `question_tokens`
    and the `answer_tokens` of the turn before. Gaps are exponential with a mean of `gap_seconds`.
    Conversations start at random within `hours`."""

    tenants: _Count = 8
    conversations: _Count = 20
    turns: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 8
    system_tokens: _Tokens = 3000
    question_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 300
    answer_tokens: _Tokens = 250
    gap_seconds: Annotated[float, msgspec.Meta(ge=0.1, le=86_400)] = 60.0
    hours: Annotated[float, msgspec.Meta(ge=0.01, le=744)] = 4.0
    ttl: Literal["5m", "1h", "none"] = "5m"
    seed: Annotated[int, msgspec.Meta(ge=0, le=2**31)] = 1

    @property
    def num_turns(self) -> int:
        return self.tenants * self.conversations * self.turns


class Target(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a fleet must give: one first token in twenty takes `first_token_p95` seconds at most;
    such shares of the ended leases lived to their expiry (`promise_kept`), and of the breakpoints
    got a lease (`leased`); nothing is refused. `requests_per_second` is the rate of the busiest
    stretch, with copies of the traffic where it has fewer; by default its own."""

    first_token_p95: Annotated[float, msgspec.Meta(gt=0, le=3600)]
    promise_kept: _Share | None = None
    leased: _Share | None = None
    requests_per_second: Annotated[float, msgspec.Meta(ge=0.001, le=1000)] | None = None


class GpuChoice(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A GPU of the list, with its price an hour ($) and, where they were measured for the planned
    model, its own times; by default the list's."""

    name: Name
    per_hour: Annotated[float, msgspec.Meta(ge=0, le=100_000)] | None = None
    prefill_us: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    decode_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] | None = None


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware and the traffic of a plan. The shape is that of `config` (a Hugging Face
    config.json) or of the family `model`. `weights_gib` is the part of `device_gib` that is not for
    keys and values; by default that of 16-bit weights and a tenth of the device. `prefill_us` is
    the time of one computed token, `decode_ms` that of a step that only decodes; by default what
    the ledger measured. Shorter prefixes than `min_cache_tokens` are not cached; by default the
    least of what the engines of the range's models say, else DEFAULT_MIN_TOKENS. The traffic is
    `trace` (lines of JSON in Mooncake's format), `made`, or the turns of a range of the ledger.
    With a `target` the plan begins with the fewest engines of each of `gpus` (all of the list by
    default) that reach it, and goes on with the cheapest of these in place of `device_gib`,
    `engines` and the times."""

    model: Name = "llama-3-8b"
    config: dict[str, Any] | None = None
    kv_dtype: KvDtype = "bfloat16"
    device_gib: Annotated[float, msgspec.Meta(gt=0, le=65_536)] = 80.0
    weights_gib: _Gib | None = None
    host_gib: _Gib = 0.0
    disk_gib: _Gib = 0.0
    engines: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] = 1
    lease_share: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.5
    max_running: Annotated[int, msgspec.Meta(ge=1, le=4096)] = 32
    prefill_us: Annotated[float, msgspec.Meta(gt=0, le=1_000_000)] | None = None
    decode_ms: Annotated[float, msgspec.Meta(ge=0, le=10_000)] | None = None
    min_cache_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    trace: Annotated[str, msgspec.Meta(max_length=MAX_TRACE_CHARACTERS)] | None = None
    made: MadeTraffic | None = None
    target: Target | None = None
    gpus: Annotated[list[GpuChoice], msgspec.Meta(min_length=1, max_length=32)] | None = None
    workspace: Name | None = None
    key: Name | None = None
    served_model: Name | None = None
    since_ms: _Ms | None = None
    until_ms: _Ms | None = None


def family_names() -> list[str]:
    return list(tomllib.loads(FAMILIES.read_text("utf-8")))


def known_gpus() -> dict[str, Gpu]:
    """By name, as `GpuChoice` has them."""
    return msgspec.toml.decode(GPUS.read_bytes(), type=dict[str, Gpu])


TRACE_UNIT = 512
MAX_MADE_BLOCKS = 2_000_000
ASSUMED_PREFILL_US, ASSUMED_DECODE_MS = 50.0, 20.0


class Turn(msgspec.Struct, array_like=True):
    """`ids` and `ends` (tokens) are of the prompt's prefixes, the shortest first; the last is the
    whole prompt but for `tail` tokens, which no other prompt shares. `segments` are the places
    among them where a content block ends, and `marks` those of breakpoints. `at` is in seconds,
    `scope` a workspace. `steps` are the positions that a breakpoint's look-back walks to each place
    from the one before, 0 inside a run of calls or of results; empty: one to each segment."""

    at: float
    scope: int
    ids: list[int]
    ends: list[int]
    segments: list[int]
    marks: list[tuple[int, Ttl]]
    output: int
    tail: int = 0
    steps: list[int] = []


class Numbers:
    """Numbers of what is equal."""

    def __init__(self) -> None:
        self._of: dict[object, int] = {}

    def of(self, thing: object) -> int:
        return self._of.setdefault(thing, len(self._of) + 1)


class _TraceLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def of_trace(lines: Iterable[str]) -> list[Turn]:
    """Mooncake's format: `timestamp` (ms), `input_length`, `output_length`, `hash_ids` of 512-token
    blocks. Every prompt is marked at its end. Raise InvalidRequest by the line."""
    decoder = msgspec.json.Decoder(_TraceLine)
    chains: dict[tuple[int, int], int] = {}
    turns: list[Turn] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        if len(turns) == MAX_TURNS:
            raise InvalidRequest(f"trace: line {number}: {MAX_TURNS:,} requests at most")
        try:
            row = decoder.decode(line)
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise InvalidRequest(f"trace: line {number}: {error}") from None
        turns.append(_of_line(row, number, chains))
    if not turns:
        raise InvalidRequest("trace: it has no request")
    return sorted(turns, key=lambda turn: turn.at)


def _of_line(row: _TraceLine, number: int, chains: dict[tuple[int, int], int]) -> Turn:
    if not 1 <= row.input_length <= 10_000_000 or not 0 <= row.output_length <= 1_000_000:
        raise InvalidRequest(
            f"trace: line {number}: input_length must be 1 to 10,000,000 and output_length at most"
            " 1,000,000"
        )
    count = -(-row.input_length // TRACE_UNIT)
    if len(row.hash_ids) < count:
        raise InvalidRequest(
            f"trace: line {number}: hash_ids: {count} ids are needed for {row.input_length} tokens"
        )
    parent, ids, known = 0, [], 0
    for place, piece in enumerate(row.hash_ids[:count]):
        found = chains.get((parent, piece))
        if found is None:
            found = chains[parent, piece] = len(chains) + 1
        elif known == place:
            known = place + 1
        parent = found
        ids.append(parent)
    ends = [min((n + 1) * TRACE_UNIT, row.input_length) for n in range(count)]
    segments = sorted({max(known - 1, 0), count - 1})
    return Turn(
        at=row.timestamp / 1e3,
        scope=0,
        ids=ids,
        ends=ends,
        segments=segments,
        marks=[(count - 1, "5m")],
        output=row.output_length,
    )


def made_up(asked: MadeTraffic) -> list[Turn]:
    """Raise InvalidRequest where these are too many turns."""
    if asked.num_turns > MAX_MADE_TURNS:
        raise InvalidRequest(
            f"made: {asked.num_turns:,} turns (tenants x conversations x turns);"
            f" {MAX_MADE_TURNS:,} at most"
        )
    if asked.num_turns * (asked.turns + 1) // 2 > MAX_MADE_BLOCKS:
        raise InvalidRequest(
            f"made.turns: {asked.turns:,} are too many for so many conversations:"
            f" {MAX_MADE_BLOCKS:,} messages in all prompts together at most"
        )
    chance, numbers = random.Random(asked.seed), Numbers()  # noqa: S311 (no secret)
    turns = []
    grown = asked.question_tokens + asked.answer_tokens
    for tenant in range(asked.tenants):
        head = [numbers.of(tenant)] if asked.system_tokens else []
        for talk in range(asked.conversations):
            at = chance.uniform(0, asked.hours * 3600)
            for turn in range(asked.turns):
                tail = [numbers.of((tenant, talk, n)) for n in range(turn + 1)]
                ends = [asked.system_tokens] * len(head)
                first = asked.system_tokens + asked.question_tokens
                ends += [first + n * grown for n in range(turn + 1)]
                places = [] if asked.ttl == "none" else sorted({0, len(ends) - 1})
                ttl: Ttl = "1h" if asked.ttl == "1h" else "5m"
                marks = [(place, ttl) for place in places]
                segments = list(range(len(ends)))
                made = Turn(at, tenant, head + tail, ends, segments, marks, asked.answer_tokens)
                turns.append(made)
                at += chance.expovariate(1 / asked.gap_seconds)
    return sorted(turns, key=lambda turn: turn.at)


def total_tokens(turns: Sequence[Turn]) -> int:
    return sum(turn.ends[-1] + turn.tail for turn in turns)


class MeasuredOn(msgspec.Struct, frozen=True, kw_only=True):
    """A model whose turns were timed, and its engine; a 0 or empty text is not known."""

    model: str
    device: str = ""
    kv_bytes_per_token: int = 0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner's process is given. `turns` are those of the ledger; the process makes those
    of a trace or a rule. `prefill_us` is the time of a computed token as the quickest quarter of
    `timed_turns` took it, None where none was timed; `decode_ms` the same of a token of an answer.
    So long, beside the engine's work, a first token took (`overhead_seconds`). Prefixes below
    `min_cache_tokens` are not cached. `measured_on` are the engines of those turns."""

    asked: PlanRequest
    turns: list[Turn] = []
    prefill_us: float | None = None
    timed_turns: int = 0
    decode_ms: float | None = None
    overhead_seconds: float = 0.0
    min_cache_tokens: int = DEFAULT_MIN_TOKENS
    measured_on: list[MeasuredOn] = []

    @property
    def computed_us(self) -> float:
        """A computed token's time: what is asked for, else what was measured, else assumed."""
        return self.asked.prefill_us or self.prefill_us or ASSUMED_PREFILL_US

    @property
    def step_ms(self) -> float:
        decode = self.asked.decode_ms if self.asked.decode_ms is not None else self.decode_ms
        return ASSUMED_DECODE_MS if decode is None else decode
