from datetime import date

import pytest

from gateway.money import dollars, per_token
from gateway.pricing import HOSTED, TokenCounts, load_prices

TODAY = date(2026, 11, 21)


@pytest.mark.parametrize(
    "model, counts, expected",
    [
        pytest.param(
            "claude-sonnet-4-6",
            TokenCounts(input=54, write_5m=2000, output=100),
            "$0.009162",
            id="V120",
        ),
        pytest.param(
            "claude-sonnet-4-6",
            TokenCounts(input=54, read=2000, output=100),
            "$0.002262",
            id="V121",
        ),
        pytest.param(
            "claude-opus-5-5",
            TokenCounts(input=50, read=100_000, output=210),
            "$0.0244",
            id="V122",
        ),
        pytest.param(
            "claude-opus-5",
            TokenCounts(input=34, write_1h=3000, write_5m=500),
            "$0.033295",
            id="V123",
        ),
        pytest.param(
            "claude-haiku-5-5",
            TokenCounts(input=4, read=99_996, output=500),
            "$0.00125036",
            id="V124",
        ),
        pytest.param(
            "claude-haiku-5-5",
            TokenCounts(input=4, read=99_997, output=500),
            "$0.00625185",
            id="V125",
        ),
    ],
)
def test_a_turn_costs_what_the_sheet_says(model: str, counts: TokenCounts, expected: str) -> None:
    price = load_prices(HOSTED).find(model, TODAY)
    assert price is not None
    assert dollars(price.cost(counts).actual) == expected


def test_an_unknown_model_has_no_price() -> None:
    assert load_prices(HOSTED).find("gpt-oss", TODAY) is None


def test_a_price_holds_from_its_date_on() -> None:
    prices = load_prices(HOSTED)
    before = prices.find("claude-sonnet-5-5", date(2026, 10, 6))
    after = prices.find("claude-sonnet-5-5", date(2026, 10, 7))
    assert before is not None and after is not None
    assert (before.rates.read, after.rates.read) == (200, 100)
    assert after.id.startswith("claude-sonnet-5-5@2026-10-07#") and after.id != before.id
    assert prices.find("claude-sonnet-5-5", date(2020, 1, 1)) is None


def test_writes_that_nobody_reads_save_less_than_nothing() -> None:
    price = load_prices(HOSTED).find("claude-sonnet-5", TODAY)
    assert price is not None
    assert dollars(price.cost(TokenCounts(write_5m=1000)).saved) == "-$0.0005"
    assert dollars(price.cost(TokenCounts(write_1h=1000)).saved) == "-$0.002"
    assert dollars(price.cost(TokenCounts(write_5m=1000, read=1000)).saved) == "$0.0013"


@pytest.mark.parametrize("price", ["0.0001", "-1", "NaN", "Infinity", "a dollar"])
def test_a_price_that_is_not_exact_is_refused(price: str) -> None:
    with pytest.raises(ValueError):
        per_token(price)
