from datetime import date
from pathlib import Path

import pytest

from engine.protocol import InputUsage
from gateway.cli.main import main
from gateway.prices.files import HOSTED, PriceBook, PriceError, load_prices
from gateway.prices.price import dollars, per_token

TODAY = date(2026, 11, 21)


SONNET = "claude-sonnet-4-6"
OPUS = "claude-opus-5-5"
HAIKU = "claude-haiku-5-5"
COSTS = {
    "V120": (SONNET, InputUsage(input_tokens=54, cache_write_5m_tokens=2000), 100, "$0.009162"),
    "V121": (SONNET, InputUsage(input_tokens=54, cache_read_tokens=2000), 100, "$0.002262"),
    "V122": (OPUS, InputUsage(input_tokens=50, cache_read_tokens=100_000), 210, "$0.0244"),
    "V123": (
        "claude-opus-5",
        InputUsage(input_tokens=34, cache_write_1h_tokens=3000, cache_write_5m_tokens=500),
        0,
        "$0.033295",
    ),
    "V124": (HAIKU, InputUsage(input_tokens=4, cache_read_tokens=99_996), 500, "$0.00125036"),
    "V125": (HAIKU, InputUsage(input_tokens=4, cache_read_tokens=99_997), 500, "$0.00625185"),
}


@pytest.mark.parametrize("model, usage, output_tokens, expected", COSTS.values(), ids=COSTS)
def test_a_turn_costs_what_the_sheet_says(
    model: str, usage: InputUsage, output_tokens: int, expected: str
) -> None:
    price = load_prices(HOSTED).find(model, TODAY)
    assert price is not None
    assert dollars(price.cost(usage, output_tokens).actual) == expected


def test_a_price_holds_from_its_date_on() -> None:
    prices = load_prices(HOSTED)
    before = prices.find("claude-sonnet-5-5", date(2026, 10, 6))
    after = prices.find("claude-sonnet-5-5", date(2026, 10, 7))
    assert before is not None and after is not None
    assert (before.rates.read, after.rates.read) == (200, 100)
    assert after.id.startswith("claude-sonnet-5-5@2026-10-07#") and after.id != before.id
    assert prices.find("claude-sonnet-5-5", date(2020, 1, 1)) is None
    assert prices.find("gpt-oss", TODAY) is None


@pytest.mark.parametrize("price", ["0.0001", "-1", "NaN", "Infinity", "a dollar"])
def test_a_price_that_is_not_exact_is_refused(price: str) -> None:
    with pytest.raises(ValueError):
        per_token(price)


GOOD = """
[[price]]
model = "large"
from = 2026-01-01
aliases = ["qwen3-*"]
input = "1"
write_5m = "1.25"
write_1h = "2"
read = "0.1"
output = "5"
"""


def with_band(value: str) -> tuple[str, str]:
    return ('output = "5"', f'output = "5"\n[[price.band]]\nabove_prompt_tokens = {value}')


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (('input = "1"', "input = 1"), "1 (`large`): input"),
        (('input = "1"', 'input = "1,25"'), "1 (`large`): input"),
        (('read = "0.1"', ""), "1 (`large`): read"),
        (('read = "0.1"', 'read = "-0.1"'), "1 (`large`): read: price `-0.1`"),
        (("2026-01-01", '"2026-01-01"'), "1 (`large`): from"),
        (("2026-01-01", "2026-01-01T00:00:00"), "1 (`large`): from: must be a day"),
        (('"large"', '"a@b"'), "model"),
        (('"large"', '"' + "a" * 73 + '"'), "model: must be a text of at most 72"),
        (('"large"', '"large\\n"'), "model: must be a text of at most 72"),
        (('model = "large"', ""), "1: model: must be a text of at most 72"),
        (('["qwen3-*"]', '"qwen3-*"'), "1 (`large`): aliases"),
        (('["qwen3-*"]', '[""]'), "1 (`large`): aliases: must be a list of texts"),
        (('read = "0.1"', 'read = "0.1"\nreed = "1"'), "1 (`large`): unknown field `reed`"),
        (with_band("5"), "1 (`large`), band 1: above_prompt_tokens"),
        (with_band("true"), "1 (`large`), band 1: above_prompt_tokens: must be one of 32000"),
        (with_band("32_000"), "1 (`large`), band 1: input: must be a price as a text"),
        (('output = "5"', 'output = "5"\nband = 1'), "[[price.band]] tables"),
        (('output = "5"', 'output = "5"\nband = [1]'), "1 (`large`), band 1"),
        (('output = "5"', 'output = "5"' + GOOD), "2 times"),
        (("[[price]]", "[price]"), "[[price]]"),
        (("[[price]]", 'source = "a"\n[[price]]'), "the day of `source`"),
        (("[[price]]", "source = 1\nas_of = 2026-01-31\n[[price]]"), "source: must be a text"),
        (("[[price]]", "vendor = 1\n[[price]]"), "unknown field `vendor`"),
    ],
)
def test_a_wrong_file_is_told_with_its_name_entry_and_field(
    tmp_path: Path, change: tuple[str, str], problem: str
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD.replace(*change, 1))
    with pytest.raises(PriceError) as raised:
        load_prices(path)
    lines = str(raised.value).splitlines()
    assert any(line.startswith(str(path)) and problem in line for line in lines), lines


@pytest.mark.parametrize("text", ["[[price", "", "\xff"])
def test_what_is_no_price_file_is_told_by_name(tmp_path: Path, text: str) -> None:
    path = tmp_path / "prices.toml"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(PriceError, match=r"prices\.toml"):
        load_prices(path)
    with pytest.raises(PriceError):
        load_prices(tmp_path / "none.toml")


def test_an_alias_is_a_pattern_and_a_name_goes_before(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD + GOOD.replace('"large"', '"qwen3-8b"').replace('"qwen3-*"', ""))
    prices = load_prices(path)
    entries = {model: prices.find(model, TODAY) for model in ("qwen3-32b", "qwen3-8b", "llama")}
    assert entries["qwen3-32b"] is not None and entries["qwen3-32b"].model == "large"
    assert entries["qwen3-8b"] is not None and entries["qwen3-8b"].model == "qwen3-8b"
    assert entries["llama"] is None


def test_a_changed_file_is_taken_over_and_a_wrong_one_is_not(tmp_path: Path) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD)
    book = PriceBook(path)
    before = book.find("large", TODAY)
    assert before is not None and not book.refresh()
    path.write_text(GOOD.replace('output = "5"', 'output = "50.5"'))
    assert book.refresh()
    after = book.find("large", TODAY)
    assert after is not None and after.rates.output == 50_500
    assert after.id != before.id
    path.write_text("[[price]]\n")
    with pytest.raises(PriceError):
        book.refresh()
    assert book.find("large", TODAY) == after


def test_the_program_lists_and_checks_prices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "prices.toml"
    path.write_text(GOOD)
    assert main(["prices", "check", str(path)]) == 0
    path.write_text(GOOD.replace("output", "outputs"))
    assert main(["prices", "check", str(path)]) == 2
    assert "output: must be a price" in capsys.readouterr().err
    assert main(["prices", "list"]) == 0
    assert "comparison only" in capsys.readouterr().out
