"""A model's prices and what a turn costs at them, in integer nano-dollars per token. Pure.

A model without a price has no cost: None, never 0.
"""

from dataclasses import dataclass
from datetime import date
from functools import cached_property
from hashlib import blake2b

from gateway.prices.money import NanoDollars

PROMPT_BANDS = (32_000, 64_000, 100_000, 128_000, 200_000, 256_000, 272_000, 512_000)
"""Prompt lengths, in tokens, above which a price may change.

The list is fixed. The ledger keeps a sum for each of these lengths, so that any sheet can price the
sums exactly after their turns were deleted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenCounts:
    """One turn's tokens by billing class. All but `output` add up to the prompt."""

    input: int = 0
    write_5m: int = 0
    write_1h: int = 0
    read: int = 0
    output: int = 0

    @property
    def prompt(self) -> int:
        return self.input + self.write_5m + self.write_1h + self.read


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    input: NanoDollars
    write_5m: NanoDollars
    write_1h: NanoDollars
    read: NanoDollars
    output: NanoDollars


@dataclass(frozen=True, slots=True)
class Band:
    above_prompt_tokens: int
    rates: TokenPrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """`without_cache` is the cost of the same tokens without a cache.

    `saved` is negative until the writes have been read often enough.
    """

    actual: NanoDollars
    without_cache: NanoDollars

    @property
    def saved(self) -> NanoDollars:
        return NanoDollars(self.without_cache - self.actual)


@dataclass(frozen=True, kw_only=True)
class Price:
    """The prices of one model from one day on. `aliases` are globs of further model ids."""

    model: str
    valid_from: date
    rates: TokenPrices
    bands: tuple[Band, ...] = ()
    aliases: tuple[str, ...] = ()

    @cached_property
    def id(self) -> str:
        """Model, day and a digest of the prices: an edited entry gets another id."""
        prices = repr((self.rates, self.bands)).encode()
        digest = blake2b(prices, digest_size=4).hexdigest()
        return f"{self.model}@{self.valid_from.isoformat()}#{digest}"

    def rates_above(self, prompt_tokens: int) -> TokenPrices:
        """The rates of prompts longer than `prompt_tokens`."""
        rates = self.rates
        for band in self.bands:
            if band.above_prompt_tokens <= prompt_tokens:
                rates = band.rates
        return rates

    def cost(self, counts: TokenCounts) -> Cost:
        """The cost of one turn."""
        return cost_at(self.rates_above(counts.prompt - 1), counts)


def cost_at(rates: TokenPrices, counts: TokenCounts) -> Cost:
    """The cost of the tokens of one turn or of many, at the same rates."""
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
