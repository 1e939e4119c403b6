"""Price sheets: five prices per model, versioned by date, in integer nano-dollars per token.

There are two files of one form. The operator's own prices make a turn's cost; published prices of
hosted models only answer what the same traffic would have cost there.

A model without a price has no cost: None, never 0. What caching saved is the cost of the same
tokens without a cache, less the cost; it is negative while writes have not been read.
"""

import asyncio
import re
import tomllib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import date, datetime
from fnmatch import fnmatchcase
from functools import cached_property, lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from gateway.base.background import pause
from gateway.base.logs import get_logger
from gateway.prices.money import NanoDollars, per_token

# Where a price may change with the prompt's length, in tokens. A fixed list, since the ledger's
# sums are told apart by it: so any sheet can price them exactly, long after the turns.
PROMPT_BANDS = (32_000, 64_000, 100_000, 128_000, 200_000, 256_000, 272_000, 512_000)
SHIPPED = Path(__file__).parent / "price_sheets.toml"
HOSTED = Path(__file__).parent / "hosted_prices.toml"
_FIELDS = ("input", "write_5m", "write_1h", "read", "output")
# With the day and the digest it must fit the ledger's column.
_MODEL = re.compile(r"[^@#\s]{1,72}")
_REFRESH_SECONDS = 5.0
_FOUND = 1024


class PriceError(Exception):
    """A price file is wrong; one line for each problem names the file, the entry and the field."""


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
    """`without_cache` is the same traffic had nothing been cached."""

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
        """Another one for every change, also for an edit that should have been a new entry."""
        prices = repr((self.rates, self.bands)).encode()
        digest = blake2b(prices, digest_size=4).hexdigest()
        return f"{self.model}@{self.valid_from.isoformat()}#{digest}"

    def rates_above(self, prompt_tokens: int) -> TokenPrices:
        """The rates of prompts longer than that; one of PROMPT_BANDS, or 0."""
        rates = self.rates
        for band in self.bands:
            if band.above_prompt_tokens <= prompt_tokens:
                rates = band.rates
        return rates

    def cost(self, counts: TokenCounts) -> Cost:
        """The cost of one turn."""
        return cost_at(self.rates_above(counts.prompt - 1), counts)


def cost_at(rates: TokenPrices, counts: TokenCounts) -> Cost:
    """The cost of tokens, of one turn or many, at the same rates."""
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
    """The prices of one file; `source` and `as_of` tell where published prices were read."""

    def __init__(
        self, prices: Iterable[Price], source: str | None = None, as_of: date | None = None
    ) -> None:
        self.source, self.as_of = source, as_of
        self.all = sorted(prices, key=lambda price: (price.model, price.valid_from))
        # Turns of an earlier version have ids without a digest.
        self._of_id = {price.id.partition("#")[0]: price for price in self.all}
        self._of_id |= {price.id: price for price in self.all}
        # Every turn asks, mostly for the same; ids may be the clients' own, so it is bounded.
        self._find_once = lru_cache(maxsize=_FOUND)(self._find)

    def find(self, model: str, on: date) -> Price | None:
        """The model's price on that day; of aliases that match, the first by name."""
        return self._find_once(model, on)

    def _find(self, model: str, on: date) -> Price | None:
        valid = [price for price in self.all if price.valid_from <= on]
        named = [price for price in valid if price.model == model]
        if not named:
            aliased = [p for p in valid if any(fnmatchcase(model, glob) for glob in p.aliases)]
            named = [price for price in aliased if price.model == aliased[0].model]
        return named[-1] if named else None

    def with_id(self, price_id: str) -> Price | None:
        """The price that a turn was priced with, if it is still in the file."""
        return self._of_id.get(price_id)

    def current(self, on: date) -> list[Price]:
        """Each model's price on that day."""
        return list({price.model: price for price in self.all if price.valid_from <= on}.values())


class PriceBook:
    """The operator's prices and the published ones; `refresh` takes over files that changed."""

    def __init__(self, own: Path | None = None, hosted: Path | None = None) -> None:
        """Raise PriceError where a file is wrong."""
        self._paths = (own or SHIPPED, hosted or HOSTED)
        self._stamps = [_stamp(path) for path in self._paths]
        self.own, self.hosted = (load_prices(path) for path in self._paths)

    def find(self, model: str, on: date) -> Price | None:
        """The operator's own price of a model: hosted prices are no cost of anybody here."""
        return self.own.find(model, on)

    def refresh(self) -> bool:
        """Read files that changed and say whether any had; on PriceError the old prices stay."""
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._stamps:
            return False
        self._stamps = stamps  # a file that is wrong is told once, and read when it changes again
        own, hosted = (load_prices(path) for path in self._paths)
        self.own, self.hosted = own, hosted
        return True

    async def run(self, stopping: asyncio.Event) -> None:
        """Refresh every few seconds, and log what could not be taken over."""
        log = get_logger("prices")
        while not stopping.is_set():
            try:
                if self.refresh():
                    log.info("prices_reloaded", prices=[price.id for price in self.own.all])
            except PriceError as error:
                log.error("prices_not_reloaded", error=str(error))
            await pause(stopping, _REFRESH_SECONDS)


def load_prices(path: Path = SHIPPED) -> PriceSheets:
    """Read a file, or raise PriceError with every problem at once."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PriceError(f"{path}: {error}") from None
    reader = _Reader()
    reader.only(document, "the file", {"price", "source", "as_of"})
    prices = reader.prices(document.get("price"))
    source = document.get("source")
    as_of = document.get("as_of")
    if source is not None and not (isinstance(source, str) and _is_day(as_of)):
        reader.problems.append("source: must be a text, and as_of its day, like 2026-01-31")
    if reader.problems:
        raise PriceError("\n".join(f"{path}: {problem}" for problem in reader.problems))
    return PriceSheets(prices, source, as_of)


@dataclass(slots=True)
class _Reader:
    """Reads entries and collects what is wrong: the entry, its field, and what it must be."""

    problems: list[str] = field(default_factory=list)

    def only(self, entry: Mapping[str, Any], place: str, names: set[str]) -> None:
        self.problems += [
            f"{place}: unknown field `{name}`" for name in sorted(entry.keys() - names)
        ]

    def prices(self, entries: object) -> list[Price]:
        if not isinstance(entries, list) or not entries:
            self.problems.append("price: must be one or more [[price]] tables")
            return []
        found = [self._price(entry, number) for number, entry in enumerate(entries, 1)]
        made = [price for price in found if price is not None]
        counted = Counter((price.model, price.valid_from) for price in made)
        self.problems += [
            f"price of `{model}` from {day}: is there {count} times"
            for (model, day), count in counted.items()
            if count > 1
        ]
        return made

    def _price(self, entry: Any, number: int) -> Price | None:
        if not isinstance(entry, dict):
            self.problems.append(f"price {number}: must be a table")
            return None
        model, day = entry.get("model"), entry.get("from")
        place = f"price {number} (`{model}`)" if isinstance(model, str) else f"price {number}"
        before = len(self.problems)
        self.only(entry, place, {"model", "from", "aliases", "band", *_FIELDS})
        if not isinstance(model, str) or not _MODEL.fullmatch(model):
            self.problems.append(f"{place}: model: must be a text of at most 72 characters, no `@`")
        if not _is_day(day):
            self.problems.append(f"{place}: from: must be a day, like 2026-01-31")
        aliases = entry.get("aliases", [])
        if not isinstance(aliases, list) or not all(isinstance(a, str) and a for a in aliases):
            self.problems.append(f"{place}: aliases: must be a list of texts")
        rates, bands = self._rates(entry, place), self._bands(entry.get("band", []), place)
        if rates is None or len(self.problems) > before:
            return None
        assert isinstance(model, str) and isinstance(day, date)
        return Price(model=model, valid_from=day, rates=rates, bands=bands, aliases=tuple(aliases))

    def _bands(self, entries: Any, place: str) -> tuple[Band, ...]:
        if not isinstance(entries, list) or not all(isinstance(band, dict) for band in entries):
            self.problems.append(f"{place}: band: must be [[price.band]] tables")
            return ()
        made = []
        for number, band in enumerate(entries, 1):
            of_band = f"{place}, band {number}"
            self.only(band, of_band, {"above_prompt_tokens", *_FIELDS})
            above, rates = band.get("above_prompt_tokens"), self._rates(band, of_band)
            if above not in PROMPT_BANDS:
                known = ", ".join(map(str, PROMPT_BANDS))
                self.problems.append(f"{of_band}: above_prompt_tokens: must be one of {known}")
            elif rates is not None:
                made.append(Band(above, rates))
        return tuple(sorted(made, key=lambda band: band.above_prompt_tokens))

    def _rates(self, entry: Mapping[str, Any], place: str) -> TokenPrices | None:
        found = {}
        for name in _FIELDS:
            value = entry.get(name)
            if not isinstance(value, str):
                self.problems.append(f'{place}: {name}: must be a price as a text, like "1.25"')
                continue
            try:
                found[name] = per_token(value)
            except ValueError as error:
                self.problems.append(f"{place}: {name}: {error}")
        return TokenPrices(**found) if len(found) == len(_FIELDS) else None


def _is_day(value: object) -> bool:
    return isinstance(value, date) and not isinstance(value, datetime)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
