"""What one turn of the sample month reads and writes on its engine, and how long it takes."""

import random
from datetime import UTC, datetime

from engine.protocol import InputUsage
from gateway.base.record import TurnRecord
from gateway.sample.arrivals import Arrival, weight
from gateway.sample.memory import SampleCache
from gateway.sample.prompts import MarkedPrefix, SamplePrompt

MIN_CACHE_TOKENS = 1024
# The time that gateway and network add to the engine's own.
_OVERHEAD_SECONDS = 0.004
_QUEUE_SECONDS = 0.09
_TIMEOUT, _GONE, _LENGTH, _TOOL_USE = 0.0012, 0.008, 0.02, 0.6


def serve(
    record: TurnRecord,
    arrival: Arrival,
    written: SamplePrompt,
    place: SampleCache,
    chance: random.Random,
) -> str | None:
    """Fill in the counts that the engine would have sent.

    Return why the turn missed, None if it hit.
    """
    ms, epoch = arrival.ms, place.epoch_at(arrival.ms)
    record.engine, record.epoch = place.machine.name, epoch
    if chance.random() < _TIMEOUT:
        record.outcome, record.duration_seconds = "timeout_error", 16.0 + chance.random()
        return None
    marks = [mark for mark in written.marks if mark.tokens >= MIN_CACHE_TOKENS]
    read, key = _read(written, marks, place, ms)
    reason = _why(arrival, written, marks, place, key)
    automatic = max(_automatic(arrival, written, reason, chance) - read, 0)
    usage = _usage(written, marks, read, automatic)
    record.take_usage(usage)
    record.miss_reason = reason
    _take_time(record, arrival, usage.computed_tokens, place, chance)
    _end(record, arrival, place, chance)
    ready_ms = ms + int((record.first_token_seconds or 0.0) * 1000)
    for mark in marks:
        place.write(mark.key, mark.tokens, mark.ttl, ms, ready_ms, chance)
    return reason


def _read(
    written: SamplePrompt, marks: list[MarkedPrefix], place: SampleCache, ms: int
) -> tuple[int, str | None]:
    """The longest entry that a breakpoint finds: at its position or up to 20 positions back."""
    keys = written.keys
    for mark in reversed(marks):
        tokens, key = place.read(keys[: keys.index(mark.key) + 1], ms)
        if key is not None:
            return tokens, key
    return 0, None


def _why(
    arrival: Arrival,
    written: SamplePrompt,
    marks: list[MarkedPrefix],
    place: SampleCache,
    key: str | None,
) -> str | None:
    """Why the last marker was not read, as far as the engine knows.

    `cold` is the answer otherwise.
    """
    if not written.marks:
        return "no_breakpoint"
    if not marks:
        return "below_minimum"
    if key == marks[-1].key:
        return None
    keys = written.keys
    behind = keys[keys.index(key) + 1 :] if key is not None else keys
    reason = place.why_missing(behind, arrival.ms)
    if reason is not None:
        return reason
    if key is not None:
        return None
    return "engine_restart" if place.lost.intersection(keys) else "cold"


def _automatic(
    arrival: Arrival, written: SamplePrompt, reason: str | None, chance: random.Random
) -> int:
    """Unmarked reuse: of content that happens to be in memory, or that another turn computes."""
    end = written.lengths[arrival.app.num_tools]
    if reason == "in_progress_race":
        return end
    if reason == "no_breakpoint" and chance.random() < 0.7:
        return end
    return 0


def _usage(
    written: SamplePrompt, marks: list[MarkedPrefix], read: int, automatic: int
) -> InputUsage:
    writes, position = {"5m": 0, "1h": 0}, read
    for mark in marks:
        if mark.tokens > position:
            writes[mark.ttl] += mark.tokens - position
            position = mark.tokens
    return InputUsage(
        input_tokens=written.tokens - position,
        cache_read_tokens=read,
        cache_write_5m_tokens=writes["5m"],
        cache_write_1h_tokens=writes["1h"],
        automatic_tokens=automatic,
        computed_tokens=written.tokens - read - automatic,
    )


def _take_time(
    record: TurnRecord,
    arrival: Arrival,
    computed: int,
    place: SampleCache,
    chance: random.Random,
) -> None:
    """Set the times: the queue by the hour's traffic, the prefill by the computed tokens."""
    busy = weight("office", datetime.fromtimestamp(arrival.ms / 1000, UTC))
    record.queue_seconds = chance.expovariate(1 / (0.001 + _QUEUE_SECONDS * busy**2))
    rate = place.machine.prefill_tokens_per_second
    record.prefill_seconds = 0.008 + computed / rate * chance.uniform(0.92, 1.2)
    overhead = _OVERHEAD_SECONDS + chance.expovariate(1 / 0.002)
    record.first_token_seconds = record.queue_seconds + record.prefill_seconds + overhead


def _end(record: TurnRecord, arrival: Arrival, place: SampleCache, chance: random.Random) -> None:
    """Set the outcome and the duration. Turns fail when their engine goes down."""
    output = chance.randint(*arrival.app.answer)
    fate = chance.random()
    if fate < _GONE:
        record.outcome, output = "client_disconnect", int(output * chance.random())
        record.stop_reason = "cancelled"
    elif fate < _GONE + _LENGTH:
        record.outcome = record.stop_reason = "length"
    else:
        calls = arrival.app.num_tools > 0 and chance.random() < _TOOL_USE
        record.outcome = record.stop_reason = "tool_use" if calls else "stop"
    record.output_tokens = output
    record.decode_seconds = output * place.machine.decode_seconds * chance.uniform(0.9, 1.5)
    record.duration_seconds = (record.first_token_seconds or 0.0) + record.decode_seconds
    if place.goes_down_within(arrival.ms, int(record.duration_seconds * 1000)):
        record.outcome, record.stop_reason, record.output_tokens = "api_error", None, 0
