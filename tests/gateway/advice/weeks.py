"""Records of a week in which each workspace has one thing to be advised on, or nothing."""

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

from engine.protocol import Message, Prompt, TextPart, Ttl
from gateway.base.record import TurnRecord
from gateway.journal.drain import charge
from gateway.prices.files import load_prices
from tests.gateway.advice.shapes import Sent, fingerprint
from tests.gateway.records import turn_record

RULES = "a rule to follow\n" * 600
NUM = 30
MARK: tuple[tuple[int, Ttl], ...] = ((0, "5m"),)


def week() -> Iterator[TurnRecord]:
    """Thirty turns of each workspace, a minute apart, from two days ago on; of `slow` and `few` see
    below."""
    start = datetime.now(UTC) - timedelta(days=2)
    for number in range(NUM):
        yield turn("unmarked", number, RULES, start)
        yield turn("nonces", number, f"request {number}\n{RULES}", start)
        yield _written(turn("unread", number, unread_text(number), start, MARK))
        if number < 5:
            yield turn("few", number, RULES, start)
        sound = turn("sound", number, RULES, start, MARK)
        yield _written(sound) if number == 0 else _read(sound)
        # Twelve minutes apart and marked for five.
        slow = _written(turn("slow", number, RULES, start + timedelta(minutes=11 * number), MARK))
        slow.prefix = "5" * 16
        slow.prefix_ttl = "5m"
        yield slow


def unread_text(number: int) -> str:
    """A system prompt that has nothing of the others."""
    return "".join(f"rule {number}.{line} of its own\n" for line in range(900))


def turn(
    workspace: str,
    number: int,
    system: str,
    start: datetime,
    marks: tuple[tuple[int, Ttl], ...] = (),
) -> TurnRecord:
    """A minute after the one before, and computed as a whole."""
    prompt = Prompt([Message("user", [TextPart(f"q {number}")])], system=[TextPart(system)])
    size = len(system) // 4
    record = turn_record(
        f"msg_{workspace}_{number:02}",
        workspace=workspace,
        key_id=f"key_{workspace}",
        engine="engine-0",
        opened_at=start + timedelta(minutes=number),
        outcome="stop",
        input_tokens=size,
        computed_tokens=size,
        output_tokens=1,
        first_token_seconds=0.1,
        prefill_seconds=size / 10_000,
        dialect="openai",
        fingerprint=fingerprint(Sent(0, prompt, marks)),
    )
    return _charged(record)


def _written(record: TurnRecord) -> TurnRecord:
    record.cache_write_5m_tokens = record.input_tokens
    record.input_tokens = 0
    return _charged(record)


def _read(record: TurnRecord) -> TurnRecord:
    record.cache_read_tokens = record.input_tokens
    record.input_tokens = 0
    record.computed_tokens = 0
    return _charged(record)


def _charged(record: TurnRecord) -> TurnRecord:
    charge(record, load_prices().find("reference", record.opened_at.date()))
    return record
