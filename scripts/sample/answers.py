"""How the sample month's engines answer.

For each turn: what it reads, what it writes and why it missed, how long it takes, and how it ends.
"""

import random
from collections.abc import Sequence
from datetime import UTC, datetime

from engine.protocol import TTLS, WRITE_FIELDS, InputUsage
from gateway.base.record import TurnRecord
from gateway.prompt.plan import section_of
from gateway.structs.usage import TurnMark
from scripts.sample.arrivals import Arrival, weight
from scripts.sample.cache import MarkedPrefix, SampleCache
from scripts.sample.prompt import SamplePrompt

MIN_CACHE_TOKENS = 1024
# The time that gateway and network add to the engine's own.
_OVERHEAD_SECONDS = 0.004
_QUEUE_SECONDS = 0.09
# The shares of turns that end in these ways.
_TIMEOUT = 0.0012
_GONE = 0.008
_LENGTH = 0.02
# Of the other turns with tools.
_TOOL_USE = 0.6


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
    read_tokens, key = _last_read(prompt, marks, place, ms)
    record.miss_reason = _miss_reason(prompt, marks, key, place, ms)
    record.marks = [_told_of(mark, prompt, key, place, ms) for mark in prompt.marks]
    is_there = _is_in_memory(record.miss_reason, chance)
    automatic = max(prompt.lengths[arrival.app.num_tools] - read_tokens, 0) if is_there else 0
    computed = prompt.tokens - read_tokens - automatic
    record.take_usage(_usage_of(prompt, marks, read_tokens, automatic))
    first = _time_prefill(record, computed, place, ms, chance)
    _end_answer(record, arrival, first, place, chance)
    for mark in marks:
        place.write(mark, ms, ms + int(first * 1000))


def _last_read(
    prompt: SamplePrompt, marks: Sequence[MarkedPrefix], place: SampleCache, ms: int
) -> tuple[int, str | None]:
    """Tokens and key of the entry that is read: at a mark's position, or up to 20 before
    it."""
    read_tokens = 0
    for mark in reversed(marks):
        read_tokens, key = place.read(prompt.keys[: prompt.keys.index(mark.key) + 1], ms)
        if key is not None:
            return read_tokens, key
    return read_tokens, None


def _miss_reason(
    prompt: SamplePrompt,
    marks: Sequence[MarkedPrefix],
    key: str | None,
    place: SampleCache,
    ms: int,
) -> str | None:
    """Why the last mark was not read; None if it was read. `key` is that of the entry that was
    read."""
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
    """What became of a mark. `key` is that of the entry that was read."""
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
    prompt: SamplePrompt, marks: Sequence[MarkedPrefix], read_tokens: int, automatic: int
) -> InputUsage:
    writes = dict.fromkeys(TTLS, 0)
    position = read_tokens
    for mark in marks:
        writes[mark.ttl] += max(mark.tokens - position, 0)
        position = max(mark.tokens, position)
    return InputUsage(
        input_tokens=prompt.tokens - position,
        cache_read_tokens=read_tokens,
        automatic_tokens=automatic,
        computed_tokens=prompt.tokens - read_tokens - automatic,
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
