"""What is told of a prefix that several requests had."""

from datetime import date
from typing import Any

import pytest

from gateway.base.record import TurnRecord
from gateway.journal.drain import charge
from gateway.ledger.database import Ledger
from gateway.ledger.reads.prefixes import last_use, prefixes
from gateway.ledger.reads.sums import Range
from gateway.ledger.upkeep import rebuild
from gateway.prices.files import load_prices
from gateway.prompt.fingerprint import Fingerprint, Point, pack, unpack
from gateway.structs.usage import PrefixReport
from tests.gateway.ledger.test_sums import at

pytestmark = pytest.mark.anyio

PRICES = load_prices()


def turn(number: int, model: str, **changes: Any) -> TurnRecord:
    record = at(number, 0, model=model, prefix_ttl="1h", **changes)
    charge(record, PRICES.find("reference", date(2026, 11, 20)))
    return record


async def only(ledger: Ledger, **of: str) -> PrefixReport:
    """The one prefix of the ledger."""
    (report,) = await prefixes(ledger, Range(since_ms=0, until_ms=2**45, **of), PRICES, 10)
    return report


@pytest.mark.parametrize("models", [("n", "m"), ("m", "n")])
async def test_a_prefix_of_two_models_says_so_and_no_ttl_is_judged(
    ledger: Ledger, models: tuple[str, str]
) -> None:
    """Each model holds it for itself: a request of one is no reader of the other."""
    first, second = models
    await ledger.insert_turns([turn(1, first, cache_write_1h_tokens=2000)])
    await ledger.insert_turns([turn(2, first, cache_read_tokens=2000)])
    alone = await only(ledger)
    assert (alone.model, alone.models, alone.better_ttl) == (first, [first], "5m")
    assert alone.better_ttl_saves_nano
    await ledger.insert_turns([turn(3, second, cache_write_1h_tokens=2000)])
    for _ in range(2):
        prefix = await only(ledger)
        assert (prefix.models, prefix.requests, prefix.model) == (["m", "n"], 3, second)
        assert prefix.saved_nano is not None
        assert (prefix.better_ttl, prefix.better_ttl_saves_nano) == (None, None)
        assert prefix.reads_to_pay_back is None
        for model in models:
            assert (await only(ledger, model=model)).models == ["m", "n"]
        await rebuild(ledger)


async def test_a_prefix_has_the_ttl_of_its_last_request_and_half_an_hour_is_not_judged(
    ledger: Ledger,
) -> None:
    """The gaps are counted up to 5 minutes and up to an hour."""
    await ledger.insert_turns([turn(1, "m", cache_write_1h_tokens=2000)])
    last = at(2, 0, model="m", cache_write_30m_tokens=2000, prefix_ttl="30m")
    charge(last, PRICES.find("reference", date(2026, 11, 20)))
    await ledger.insert_turns([last])
    report = await only(ledger)
    assert report.ttl == "30m"
    assert (report.better_ttl, report.better_ttl_saves_nano) == (None, None)
    assert report.reads_to_pay_back == 1


async def test_rows_of_a_later_version_are_read(ledger: Ledger) -> None:
    """Their class is not known here. It is told as it is, and counts as the longest one that is
    no longer."""
    marked = Fingerprint(
        model="m",
        parameters=b"",
        num_tools=0,
        num_system=1,
        points=[Point(0, None, bytes(8), 9)],
        marks=[(0, "12h")],
    )
    packed = pack(marked).replace(b"\xa312h", b"\xa361m")
    about = {"engine": "engine-0", "engine_model": "m", "epoch": "e", "fingerprint": packed}
    for number in (1, 2):
        record = turn(number, "m", cache_write_1h_tokens=2000, **about)
        record.prefix_ttl = "61m"
        await ledger.insert_turns([record])
    report = await only(ledger)
    assert report.ttl == "61m" and report.look is not None
    assert (report.look.ttl, report.look.num_system) == ("61m", 1)
    assert (report.better_ttl, report.better_ttl_saves_nano) == (None, None)
    assert report.reads_to_pay_back == 2, "a write costs what one for an hour does"
    use = await last_use(ledger, "a", [report.prefix])
    assert use is not None and use.seconds == 3600
    assert unpack(packed).marks == [(0, "1h")]
