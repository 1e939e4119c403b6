"""The turn explorer's filters: each turn that matches is on one page, and no page looks at all."""

import random
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import get_args

import pytest

from engine.protocol import FinishReason
from gateway.base.errors import GatewayError, TooLarge
from gateway.base.record import CLIENT_DISCONNECT, TurnRecord
from gateway.journal.rebuilt import OUTCOME as LOST
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Queries, Range
from gateway.ledger.reads.turns import Cursor, TurnFilter, page_of
from gateway.structs.usage import is_error
from tests.gateway.records import turn_record

pytestmark = pytest.mark.anyio

START = datetime(2026, 11, 20, tzinfo=UTC)
ALL = Range(since_ms=0, until_ms=int(START.timestamp() * 1000) + 86_400_000)
CLIENTS = ("Anthropic/Python 0.84", "anthropic/lower", "Anthropic/JS 1", "curl/8_%", None)
NUM_TURNS = 100


def turns() -> list[TurnRecord]:
    """Some begin in one moment; prompts are of 0, 1, 99 and 100 tokens."""
    chance = random.Random(56)
    records = []
    for number in range(NUM_TURNS):
        prompt = chance.choice((0, 1, 99, 100))
        read_tokens = min(prompt, chance.choice((0, 0, 1, 49, 50, 99, 100)))
        records.append(
            turn_record(
                f"msg_{number:04}",
                opened_at=START + timedelta(seconds=number // 3),
                user_agent=chance.choice(CLIENTS),
                key_id=chance.choice(("key_1", "key_2")),
                miss_reason=None if read_tokens else "cold",
                input_tokens=prompt - read_tokens,
                cache_read_tokens=read_tokens,
            )
        )
    return records


def percent(turn: TurnRecord) -> float | None:
    prompt = turn.input_tokens + turn.cache_read_tokens
    return 100 * turn.cache_read_tokens / prompt if prompt else None


def is_within(low: float, high: float) -> Callable[[TurnRecord], bool]:
    def check(turn: TurnRecord) -> bool:
        share = percent(turn)
        return share is not None and low <= share <= high

    return check


CASES: dict[str, tuple[TurnFilter, Callable[[TurnRecord], bool]]] = {
    "client": (
        TurnFilter(client="Anthropic/"),
        lambda turn: (turn.user_agent or "").startswith("Anthropic/"),
    ),
    "client with a pattern's letters": (
        TurnFilter(client="curl/8_%"),
        lambda turn: turn.user_agent == "curl/8_%",
    ),
    "none": (TurnFilter(client="nobody"), lambda turn: False),
    "least": (TurnFilter(min_read_percent=50), is_within(50, 100)),
    "most": (TurnFilter(max_read_percent=50), is_within(0, 50)),
    "exactly": (TurnFilter(min_read_percent=100, max_read_percent=100), is_within(100, 100)),
    "with the reason and the key": (
        TurnFilter(miss_reason="cold", key_id="key_1", max_read_percent=0),
        lambda turn: (
            turn.miss_reason == "cold" and turn.key_id == "key_1" and is_within(0, 0)(turn)
        ),
    ),
    "a read": (TurnFilter(has_read=True), lambda turn: turn.cache_read_tokens > 0),
}


async def test_pages_have_each_turn_that_matches_once_and_in_order(ledger: Ledger) -> None:
    known = turns()
    await ledger.insert_turns(known)
    newest_first = sorted(known, key=lambda turn: (turn.opened_at, turn.id), reverse=True)
    for name, (which, matches) in CASES.items():
        matching = [turn.id for turn in newest_first if matches(turn)]
        for max_searched in (1, 7, NUM_TURNS - 1, NUM_TURNS, 20_000):
            ids, num_pages = await paged(ledger, which, max_searched)
            assert ids == matching, (name, max_searched)
            if max_searched == 7 and which.miss_reason is None:
                assert num_pages >= NUM_TURNS // 7, f"{name}: a page looked at all"


def error_types(of: type[GatewayError] = GatewayError) -> set[str]:
    return {of.type}.union(*(error_types(kind) for kind in of.__subclasses__()))


async def test_failed_turns_are_the_same_in_the_sums_and_in_the_explorer(ledger: Ledger) -> None:
    """An outcome is a finish reason, the type of an error, or what became of client or gateway."""
    # The size of a body is looked at before there is a turn.
    failed = error_types() - {TooLarge.type}
    assert len(failed) > 5 and all(map(is_error, failed))
    others = {*get_args(FinishReason), CLIENT_DISCONNECT, LOST, "gateway_killed"}
    known = [
        turn_record(f"msg_{number:04}", outcome=outcome, opened_at=START)
        for number, outcome in enumerate(sorted(failed | others))
    ]
    await ledger.insert_turns(known)
    ids, _ = await paged(ledger, TurnFilter(outcome="error"), NUM_TURNS)
    assert {*ids} == {turn.id for turn in known if turn.outcome in failed}
    assert {*ids} == {turn.id for turn in known if is_error(turn.outcome)}
    assert (await Queries(ledger).totals(ALL)).errors == len(failed)


async def paged(ledger: Ledger, which: TurnFilter, max_searched: int) -> tuple[list[str], int]:
    """The ids of all pages of three turns, and how many pages these are."""
    ids: list[str] = []
    after = None
    num_pages = 0
    async with ledger.snapshot() as connection:
        while True:
            page = await page_of(connection, ALL, which, 3, after, max_searched)
            num_pages += 1
            assert len(page.turns) <= 3
            ids += [turn.id for turn in page.turns]
            if page.num_searched is not None:
                assert page.num_searched == max_searched and page.next is not None
            if page.next is None:
                return ids, num_pages
            after = Cursor.parse(page.next)


async def test_a_page_without_such_filters_is_not_cut(ledger: Ledger) -> None:
    await ledger.insert_turns(turns())
    async with ledger.snapshot() as connection:
        page = await page_of(connection, ALL, TurnFilter(), NUM_TURNS, None, 5)
    assert len(page.turns) == NUM_TURNS and page.next is None and page.num_searched is None
