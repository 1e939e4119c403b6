"""Turns as the simulation needs them: how far prompts are equal, how long they are, when they came.

Turns have no content. They have numbers for their prefixes. Equal numbers mean equal prefixes.
"""

from collections.abc import Iterable, Sequence
from typing import Annotated

import msgspec

from engine.protocol import Ttl
from gateway.base.errors import InvalidRequest
from gateway.base.rounding import ceil_div

MAX_TURNS = 100_000
DEFAULT_MIN_TOKENS = 1024
"""The shortest prefix that an engine caches by default."""
MAX_TRACE_CHARACTERS = 8 * 2**20
TRACE_UNIT = 512
"""The tokens of a block in published traces."""
MAX_ENGINES = 64
MAX_POOL_TOKENS = 2**40
# PostgreSQL takes no NUL.
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128, pattern=r"^[^\x00]+$")]
_Ms = Annotated[int, msgspec.Meta(ge=0, le=253_402_300_799_999)]
_Tokens = Annotated[int, msgspec.Meta(ge=0, le=MAX_POOL_TOKENS)]
_Share = Annotated[float, msgspec.Meta(ge=0, le=1)]


class PlanRequest(msgspec.Struct, frozen=True, kw_only=True):
    """The traffic of a plan, and the engines that are to serve it.

    The traffic is a range of the ledger, or a `trace`. Facts about the engines that are left out
    are taken from the engines of the range's model.
    """

    # Tokens of one engine's memory for keys and values, in each tier.
    device_tokens: Annotated[int, msgspec.Meta(ge=1, le=MAX_POOL_TOKENS)] | None = None
    host_tokens: _Tokens | None = None
    disk_tokens: _Tokens | None = None
    engines: Annotated[int, msgspec.Meta(ge=1, le=MAX_ENGINES)] | None = None
    # The part of the device's memory that leases may hold.
    lease_share: _Share = 0.5
    # The most requests that one engine computes together.
    max_running: Annotated[int, msgspec.Meta(ge=1, le=4096)] | None = None
    # The tokens of the shortest prefix that is cached.
    min_cache_tokens: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] | None = None
    # Lines of JSON in Mooncake's format.
    trace: Annotated[str, msgspec.Meta(max_length=MAX_TRACE_CHARACTERS)] | None = None
    # Tokens of a block of the trace.
    trace_block_tokens: Annotated[int, msgspec.Meta(ge=1, le=65_536)] = TRACE_UNIT
    # The range of the ledger.
    workspace: Name | None = None
    key: Name | None = None
    served_model: Name | None = None
    since_ms: _Ms | None = None
    until_ms: _Ms | None = None


class Turn(msgspec.Struct, array_like=True):
    """One prompt by its prefixes, the shortest first. A *place* is a prefix's index among them."""

    # When it was sent, in seconds.
    at: float
    # A workspace's number.
    scope: int
    # The number of each prefix.
    ids: list[int]
    # The tokens of each prefix.
    ends: list[int]
    # The places where a content block ends.
    segments: list[int]
    # The place and the TTL of each breakpoint.
    marks: list[tuple[int, Ttl]]
    # The tokens of the answer.
    output: int
    # The tokens behind the last prefix. No other prompt shares them.
    tail: int = 0
    # For each place: the positions that a breakpoint's look-back counts from the place before. It
    # is 0 inside a run of calls or of results. Empty: each segment counts 1.
    steps: list[int] = []
    # The places of breakpoints that ask for no lease.
    unheld: list[int] = []


class Numbers:
    """Numbers from 1. Equal keys have equal numbers."""

    def __init__(self) -> None:
        self._numbers: dict[object, int] = {}

    def of(self, key: object) -> int:
        return self._numbers.setdefault(key, len(self._numbers) + 1)


class _TraceLine(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]


def of_trace(lines: Iterable[str], block_tokens: int = TRACE_UNIT) -> list[Turn]:
    """The turns of a trace in Mooncake's format, in order of time. Every prompt is marked at its
    end.

    A line has `timestamp` (ms), `input_length` and `output_length` (tokens), and `hash_ids` of
    blocks of `block_tokens`. Raise InvalidRequest, which names the wrong line.
    """
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
        turns.append(_of_line(row, number, chains, block_tokens))
    if not turns:
        raise InvalidRequest("trace: it has no request")
    return sorted(turns, key=lambda turn: turn.at)


def _of_line(
    row: _TraceLine, number: int, chains: dict[tuple[int, int], int], block_tokens: int
) -> Turn:
    if not 1 <= row.input_length <= 10_000_000 or not 0 <= row.output_length <= 1_000_000:
        raise InvalidRequest(
            f"trace: line {number}: input_length must be 1 to 10,000,000 and output_length at most"
            " 1,000,000"
        )
    count = ceil_div(row.input_length, block_tokens)
    if len(row.hash_ids) < count:
        raise InvalidRequest(
            f"trace: line {number}: hash_ids: {count} ids are needed for {row.input_length} tokens"
            f" in blocks of {block_tokens}"
        )
    parent = 0
    ids = []
    num_shared = 0
    for place, piece in enumerate(row.hash_ids[:count]):
        chain = chains.get((parent, piece))
        if chain is None:
            chain = chains[parent, piece] = len(chains) + 1
        elif num_shared == place:
            num_shared = place + 1
        parent = chain
        ids.append(parent)
    ends = [min((n + 1) * block_tokens, row.input_length) for n in range(count)]
    segments = sorted({max(num_shared - 1, 0), count - 1})
    return Turn(
        at=row.timestamp / 1e3,
        scope=0,
        ids=ids,
        ends=ends,
        segments=segments,
        marks=[(count - 1, "5m")],
        output=row.output_length,
    )


def total_tokens(turns: Sequence[Turn]) -> int:
    return sum(turn.ends[-1] + turn.tail for turn in turns)


class EngineFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the engines of one model say of themselves, as plans need it."""

    # How many of them there are.
    engines: int
    # Tokens of one engine's memory in each tier; 0 where it has no such tier.
    device_tokens: int
    host_tokens: int = 0
    disk_tokens: int = 0
    # Bytes of a token's keys and values; 0 if they are not known.
    bytes_per_token: int = 0
    max_running: int = 0
    min_cache_tokens: int = DEFAULT_MIN_TOKENS


class Times(msgspec.Struct, frozen=True, kw_only=True):
    """How long the engines of the range took, by its own turns."""

    # Microseconds of a computed token, as the quickest quarter of `timed_turns` took it.
    prefill_us: float
    timed_turns: int
    # Milliseconds of a token of an answer, as the quickest quarter took it.
    decode_ms: float
    # Seconds of a first token beside the engine's work: the median.
    overhead_seconds: float = 0.0


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """The input of the planner's process. The process itself makes the turns of a trace."""

    request: PlanRequest
    turns: list[Turn] = []
    # Whether the range has older turns that are left out.
    is_cut: bool = False
    # The number of the range's turns that are of an earlier version, without prefixes to plan with.
    num_unknown: int = 0
    # The range's models.
    models: list[str] = []
    # None where no engine of the range's model is there.
    engine: EngineFacts | None = None
    # None where no turn of the range was timed.
    times: Times | None = None
