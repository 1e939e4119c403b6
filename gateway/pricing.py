"""Price sheets: five prices per model, versioned by date, in integer nano-dollars per token.

A model without a price has no cost: None, never 0. What caching saved is the cost of the same
tokens without a cache, less the cost; it is negative while writes have not been read.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from gateway.money import NanoDollars, per_token

SHIPPED = Path(__file__).parent / "price_sheets.toml"


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """One turn's tokens by billing class; all but `output` add up to the prompt."""

    input: int = 0
    write_5m: int = 0
    write_1h: int = 0
    read: int = 0
    output: int = 0

    @property
    def prompt(self) -> int:
        return self.input + self.write_5m + self.write_1h + self.read


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    input: NanoDollars
    write_5m: NanoDollars
    write_1h: NanoDollars
    read: NanoDollars
    output: NanoDollars


@dataclass(frozen=True, slots=True)
class Band:
    above_prompt_tokens: int
    rates: Rates


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`without_cache` is the same traffic had nothing been cached."""

    actual: NanoDollars
    without_cache: NanoDollars

    @property
    def saved(self) -> NanoDollars:
        return NanoDollars(self.without_cache - self.actual)


@dataclass(frozen=True, slots=True, kw_only=True)
class Price:
    model: str
    valid_from: date
    rates: Rates
    bands: tuple[Band, ...] = ()

    @property
    def id(self) -> str:
        return f"{self.model}@{self.valid_from.isoformat()}"

    def cost(self, counts: TokenCounts) -> Cost:
        rates = self.rates
        for band in self.bands:
            if counts.prompt > band.above_prompt_tokens:
                rates = band.rates
        output = counts.output * rates.output
        actual = (
            counts.input * rates.input
            + counts.write_5m * rates.write_5m
            + counts.write_1h * rates.write_1h
            + counts.read * rates.read
            + output
        )
        without_cache = counts.prompt * rates.input + output
        return Cost(actual=NanoDollars(actual), without_cache=NanoDollars(without_cache))


class PriceSheets:
    def __init__(self, prices: list[Price]) -> None:
        self._prices: dict[str, list[Price]] = {}
        for price in sorted(prices, key=lambda price: price.valid_from):
            self._prices.setdefault(price.model, []).append(price)

    def find(self, model: str, on: date) -> Price | None:
        valid = [price for price in self._prices.get(model, ()) if price.valid_from <= on]
        return valid[-1] if valid else None


def load_prices(path: Path = SHIPPED) -> PriceSheets:
    with path.open("rb") as file:
        document = tomllib.load(file)
    return PriceSheets([_price(entry) for entry in document["price"]])


def _price(entry: Mapping[str, Any]) -> Price:
    bands = [Band(band["above_prompt_tokens"], _rates(band)) for band in entry.get("band", [])]
    return Price(
        model=entry["model"],
        valid_from=entry["from"],
        rates=_rates(entry),
        bands=tuple(sorted(bands, key=lambda band: band.above_prompt_tokens)),
    )


def _rates(entry: Mapping[str, str]) -> Rates:
    return Rates(
        input=per_token(entry["input"]),
        write_5m=per_token(entry["write_5m"]),
        write_1h=per_token(entry["write_1h"]),
        read=per_token(entry["read"]),
        output=per_token(entry["output"]),
    )
