"""Price files: TOML with one [[price]] table for each model and each first day of its prices.

The form is described in `price_sheets.toml`. An error names the file, the entry and the field. The
operator's own prices make a turn's cost. Published prices of hosted models are for comparison only:
what would the same traffic have cost there?
"""

import asyncio
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import ErrorDetails

from engine.protocol import TTLS, Ttl
from gateway.base.background import pause
from gateway.base.logs import get_logger
from gateway.prices.price import (
    PROMPT_BANDS,
    Band,
    NanoDollars,
    Price,
    PriceSheets,
    TokenPrices,
    per_token,
)

SHIPPED = Path(__file__).parent / "price_sheets.toml"
HOSTED = Path(__file__).parent / "hosted_prices.toml"
WRITES: dict[str, Ttl] = {f"write_{ttl}": ttl for ttl in TTLS}
"""The field of each TTL class."""

_REFRESH_SECONDS = 5.0
_PRICE = 'must be a price as a text, like "1.25"'
_MUST = {
    **dict.fromkeys(("input", *WRITES, "read", "output"), _PRICE),
    "model": "must be a text of at most 72 characters, no `@`",
    "from": "must be a day, like 2026-01-31",
    "aliases": "must be a list of texts",
    "band": "must be [[price.band]] tables",
    "above_prompt_tokens": f"must be one of {', '.join(map(str, PROMPT_BANDS))}",
    "price": "must be one or more [[price]] tables",
    "source": "must be a text",
    "as_of": "must be a day, like 2026-01-31",
}


class PriceError(Exception):
    """A price file is wrong; one line for each problem names the file, the entry and the field."""


def _exact(value: Any) -> NanoDollars:
    if not isinstance(value, str):
        raise ValueError(_PRICE)
    return per_token(value)


def _is_band(value: int) -> int:
    if value not in PROMPT_BANDS:
        raise ValueError(_MUST["above_prompt_tokens"])
    return value


_Nano = Annotated[NanoDollars, BeforeValidator(_exact)]
# A model's name, the day and a digest together must fit the ledger's column.
_Model = Annotated[str, Field(pattern=r"^[^@#\s]{1,72}\z")]


class _Rates(BaseModel):
    """Dollars per million tokens in the file, nano-dollars per token here."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    input: _Nano
    write_5m: _Nano
    write_30m: _Nano | None = None
    write_1h: _Nano
    read: _Nano
    output: _Nano

    @property
    def prices(self) -> TokenPrices:
        return TokenPrices(
            input=self.input,
            writes={
                ttl: price
                for name, ttl in WRITES.items()
                if (price := getattr(self, name)) is not None
            },
            read=self.read,
            output=self.output,
        )


class _BandTable(_Rates):
    above_prompt_tokens: Annotated[int, Field(strict=True), BeforeValidator(_is_band)]


class _PriceTable(_Rates):
    model: _Model
    valid_from: date = Field(alias="from")
    aliases: list[Annotated[str, Field(min_length=1)]] = []
    band: list[_BandTable] = []

    @property
    def price(self) -> Price:
        bands = sorted(self.band, key=lambda band: band.above_prompt_tokens)
        return Price(
            model=self.model,
            valid_from=self.valid_from,
            rates=self.prices,
            bands=tuple(Band(band.above_prompt_tokens, band.prices) for band in bands),
            aliases=tuple(self.aliases),
        )


class _PriceFile(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    price: list[_PriceTable] = Field(min_length=1)
    source: str | None = None
    as_of: date | None = None


def load_prices(path: Path = SHIPPED) -> PriceSheets:
    """Read a file, or raise PriceError with every problem at once."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PriceError(f"{path}: {error}") from None
    problems = list(_rules_between_entries(document))
    try:
        read = _PriceFile.model_validate(document)
    except ValidationError as error:
        found = error.errors(include_url=False, include_input=False)
        problems = [*(_problem(each, document) for each in found), *problems]
    if problems:
        raise PriceError("\n".join(f"{path}: {problem}" for problem in problems))
    return PriceSheets((table.price for table in read.price), read.source, read.as_of)


def _rules_between_entries(document: dict[str, Any]) -> Iterator[str]:
    if "source" in document and "as_of" not in document:
        yield "as_of: must be the day of `source`, like 2026-01-31"
    counted = Counter((table.get("model"), str(table.get("from"))) for table in _tables(document))
    for (model, day), count in counted.items():
        if count > 1:
            yield f"price of `{model}` from {day}: is there {count} times"


def _tables(document: dict[str, Any]) -> Sequence[dict[str, Any]]:
    """The entries that are tables and name a model."""
    found = document.get("price")
    tables = [each for each in found if isinstance(each, dict)] if isinstance(found, list) else []
    return [table for table in tables if isinstance(table.get("model"), str)]


def _problem(error: ErrorDetails, document: dict[str, Any]) -> str:
    """One line: the entry, the field, and what it must be."""
    match error["loc"]:
        case ("price", int(number), "band", int(band), *rest):
            place = f"{_entry(document, number)}, band {band + 1}"
        case ("price", int(number), *rest):
            place = _entry(document, number)
        case (*rest,):
            place = "the file"
    if not rest:
        return f"{place}: must be a table"
    field = str(rest[0])
    if error["type"] == "extra_forbidden":
        return f"{place}: unknown field `{field}`"
    reason = error["ctx"]["error"] if error["type"] == "value_error" else _MUST[field]
    return f"{field}: {reason}" if place == "the file" else f"{place}: {field}: {reason}"


def _entry(document: dict[str, Any], number: int) -> str:
    """The entry's number, and its model's name if that is a single line."""
    table = document["price"][number]
    model = table.get("model") if isinstance(table, dict) else None
    is_line = isinstance(model, str) and model.isprintable()
    return f"price {number + 1} (`{model}`)" if is_line else f"price {number + 1}"


class PriceBook:
    """The operator's prices and the published ones. `refresh` reads files that changed."""

    def __init__(self, own: Path | None = None, hosted: Path | None = None) -> None:
        """Raise PriceError where a file is wrong."""
        self._paths = (own or SHIPPED, hosted or HOSTED)
        self._stamps = [_stamp(path) for path in self._paths]
        self.own, self.hosted = (load_prices(path) for path in self._paths)

    @property
    def is_placeholder(self) -> bool:
        """Whether the operator's prices are the shipped ones, which are nobody's costs."""
        return self._paths[0] == SHIPPED

    def find(self, model: str, on: date) -> Price | None:
        """The operator's own price of a model. Published prices make no cost."""
        return self.own.find(model, on)

    def refresh(self) -> bool:
        """Read files that changed; return whether any had. On PriceError the old prices stay."""
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._stamps:
            return False
        self._stamps = stamps  # a file that is wrong is told once, and read when it changes again
        own, hosted = (load_prices(path) for path in self._paths)
        self.own, self.hosted = own, hosted
        return True

    async def run(self, stopping: asyncio.Event) -> None:
        """Refresh every few seconds. Log a file that is wrong."""
        log = get_logger("prices")
        while not stopping.is_set():
            try:
                if self.refresh():
                    log.info("prices_reloaded", prices=[price.id for price in self.own.all])
            except PriceError as error:
                log.error("prices_not_reloaded", error=str(error))
            await pause(stopping, _REFRESH_SECONDS)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size
