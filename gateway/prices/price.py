"""A model's prices and what a turn costs at them, in integer nano-dollars per token. Pure.

A model without a price has no cost: None, never 0.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from decimal import Decimal, InvalidOperation
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from hashlib import blake2b
from typing import NewType

from engine.protocol import TTLS, InputUsage, Ttl

NanoDollars = NewType("NanoDollars", int)
_NANO_PER_TOKEN = Decimal(1000)
_NANO_PER_DOLLAR = 1_000_000_000


def per_token(dollars_per_million: str) -> NanoDollars:
    """Convert dollars per million tokens into nano-dollars per token. Raise ValueError where the
    result is not a whole number."""
    try:
        nano = Decimal(dollars_per_million) * _NANO_PER_TOKEN
    except InvalidOperation:
        raise ValueError(f"price `{dollars_per_million}` is not a number") from None
    if not nano.is_finite() or nano != nano.to_integral_value() or nano < 0:
        raise ValueError(f"price `{dollars_per_million}` is not whole nano-dollars per token")
    return NanoDollars(int(nano))


def per_million(price: NanoDollars) -> str:
    """Write nano-dollars per token as dollars per million tokens, exactly."""
    return f"{(Decimal(price) / _NANO_PER_TOKEN).normalize():f}"


def dollars(amount: NanoDollars) -> str:
    """Write an amount of nano-dollars in dollars, exactly."""
    sign = "-" if amount < 0 else ""
    whole, nano = divmod(abs(amount), _NANO_PER_DOLLAR)
    fraction = f"{nano:09d}".rstrip("0")
    return f"{sign}${whole}.{fraction or '0'}"


_MAX_REMEMBERED = 1024
PROMPT_BANDS = (32_000, 64_000, 100_000, 128_000, 200_000, 256_000, 272_000, 512_000)
"""Prompt lengths, in tokens, above which a price may change.

The list is fixed. The ledger keeps a sum for each of these lengths, so that any sheet can price the
sums exactly after their turns were deleted.
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenPrices:
    """Prices in nano-dollars per token."""

    input: NanoDollars
    # The prices of writes that the sheet names, by TTL class. Others cost the class's multiple.
    writes: Mapping[Ttl, NanoDollars]
    read: NanoDollars
    output: NanoDollars

    def write(self, ttl: Ttl) -> NanoDollars:
        """The price of a written token of this TTL class."""
        named = self.writes.get(ttl)
        return NanoDollars(round(self.input * TTLS[ttl].write_multiple)) if named is None else named

    def text(self) -> str:
        """The text from which a price's id is made. TTL classes that the sheet does not name are
        left out, so that a new class changes no id."""
        writes = "".join(f"write_{t}={self.writes[t]}, " for t in TTLS if t in self.writes)
        return f"TokenPrices(input={self.input}, {writes}read={self.read}, output={self.output})"


@dataclass(frozen=True, slots=True)
class Band:
    """The rates of prompts with more tokens than a bound."""

    above_prompt_tokens: int
    rates: TokenPrices


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """A cost in nano-dollars."""

    actual: NanoDollars
    # The cost of the same tokens without a cache.
    without_cache: NanoDollars


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
        """The model, the day and a digest of the prices. So an edited entry gets another id."""
        bands = [
            f"Band(above_prompt_tokens={band.above_prompt_tokens}, rates={band.rates.text()})"
            for band in self.bands
        ]
        # Python writes a tuple of one item with a comma behind it.
        listed = f"({', '.join(bands)}{',' if len(bands) == 1 else ''})"
        prices = f"({self.rates.text()}, {listed})".encode()
        digest = blake2b(prices, digest_size=4).hexdigest()
        return f"{self.model}@{self.valid_from.isoformat()}#{digest}"

    def rates_above(self, prompt_tokens: int) -> TokenPrices:
        """The rates of prompts longer than `prompt_tokens`."""
        rates = self.rates
        for band in self.bands:
            if band.above_prompt_tokens <= prompt_tokens:
                rates = band.rates
        return rates

    def cost(self, usage: InputUsage, output_tokens: int) -> Cost:
        """The cost of one turn."""
        return cost_at(self.rates_above(usage.prompt_tokens - 1), usage, output_tokens)

    def most(self, prompt_tokens: int, output_tokens: int) -> NanoDollars:
        """The most that a turn of so many tokens can cost: no token is read, and each token of the
        prompt costs the dearest rate."""
        rates = self.rates_above(prompt_tokens - 1)
        dearest = max(rates.input, *(rates.write(ttl) for ttl in TTLS))
        return NanoDollars(prompt_tokens * dearest + output_tokens * rates.output)


def cost_at(rates: TokenPrices, usage: InputUsage, output_tokens: int) -> Cost:
    """The cost of the tokens of one turn, or of many turns with the same rates."""
    output = output_tokens * rates.output
    actual = usage.input_tokens * rates.input + usage.cache_read_tokens * rates.read + output
    actual += sum(tokens * rates.write(ttl) for ttl, tokens in usage.writes.items())
    without_cache = usage.prompt_tokens * rates.input + output
    return Cost(actual=NanoDollars(actual), without_cache=NanoDollars(without_cache))


def cost_with_ttl(rates: TokenPrices, ttl: Ttl, tokens: int, requests: int, in_time: int) -> int:
    """The cost of a prefix of `tokens` tokens in `requests` requests, in the unit of the rates.

    `in_time` of the requests read the prefix, and the others write it.
    """
    return tokens * (rates.write(ttl) * (requests - in_time) + rates.read * in_time)


class PriceSheets:
    """All prices of a file. `source` and `as_of` say where and when published prices were read."""

    def __init__(
        self, prices: Iterable[Price], source: str | None = None, as_of: date | None = None
    ) -> None:
        self.source = source
        self.as_of = as_of
        self.all = sorted(prices, key=lambda price: (price.model, price.valid_from))
        # Turns of an earlier version have ids without a digest.
        self._of_id = {price.id.partition("#")[0]: price for price in self.all}
        self._of_id |= {price.id: price for price in self.all}
        # Every turn looks up its model. Clients choose the ids, so the number of remembered ids is
        # bounded.
        self.find = lru_cache(maxsize=_MAX_REMEMBERED)(self._find)

    def _find(self, model: str, on: date) -> Price | None:
        """The model's price on that day; None without one. If aliases of several models match, the
        first model by name counts."""
        valid = [price for price in self.all if price.valid_from <= on]
        named = [price for price in valid if price.model == model]
        if not named:
            aliased = [
                price for price in valid if any(fnmatchcase(model, glob) for glob in price.aliases)
            ]
            named = [price for price in aliased if price.model == aliased[0].model]
        return named[-1] if named else None

    def with_id(self, price_id: str) -> Price | None:
        """The price with this id; None where the file no longer has it."""
        return self._of_id.get(price_id)

    def current(self, on: date) -> list[Price]:
        """Each model's price on that day."""
        return list({price.model: price for price in self.all if price.valid_from <= on}.values())
