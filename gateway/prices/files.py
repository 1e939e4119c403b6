"""Price files: TOML with one [[price]] table for each model and each first day of its prices.

`price_sheets.toml` describes the form. An error names the file, the entry and the field. A turn's
cost comes from the operator's own prices. Published prices of hosted models are only for
comparison: what would the same traffic have cost there?
"""

import asyncio
import re
import tomllib
from collections import Counter
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

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
"""The TTL class of each field with a price of writes."""
_REFRESH_SECONDS = 5.0


class PriceError(Exception):
    """A price file is wrong. The message has a line for each problem, which names the file, the
    entry and the field."""


Reader = Callable[[Any], Any]


def _price(value: Any) -> NanoDollars:
    """Dollars per million tokens in the file, nano-dollars per token here."""
    if not isinstance(value, str):
        raise ValueError('must be a price as a text, like "1.25"')
    return per_token(value)


def _that(is_right: Callable[[Any], bool], must: str) -> Reader:
    """A reader that returns right values. For wrong values it raises ValueError with the message
    `must`."""

    def read(value: Any) -> Any:
        if not is_right(value):
            raise ValueError(must)
        return value

    return read


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) and item for item in value)


_DAY = _that(lambda value: type(value) is date, "must be a day, like 2026-01-31")
# A model's name, the day and a digest together must fit the ledger's column.
_MODEL = re.compile(r"[^@#\s]{1,72}")
# The readers of the fields, for each kind of table.
_RATES: dict[str, Reader] = dict.fromkeys(("input", *WRITES, "read", "output"), _price)
_BAND = _RATES | {
    "above_prompt_tokens": _that(
        lambda value: type(value) is int and value in PROMPT_BANDS,
        f"must be one of {', '.join(map(str, PROMPT_BANDS))}",
    )
}
_ENTRY = _RATES | {
    "model": _that(
        lambda value: isinstance(value, str) and _MODEL.fullmatch(value) is not None,
        "must be a text of at most 72 characters, no `@`",
    ),
    "from": _DAY,
    "aliases": _that(_are_texts, "must be a list of texts"),
    "band": _that(lambda value: isinstance(value, list), "must be [[price.band]] tables"),
}
_FILE = {
    "price": _that(
        lambda value: isinstance(value, list) and bool(value),
        "must be one or more [[price]] tables",
    ),
    "source": _that(lambda value: isinstance(value, str), "must be a text"),
    "as_of": _DAY,
}
_MUST_NAME = {"write_5m", "write_1h"}
"""The prices of writes that every sheet must have. By default other classes of writes cost their
multiples of the input price."""
_MAY_LACK = {"aliases", "band", "source", "as_of", *WRITES} - _MUST_NAME


def load_prices(path: Path = SHIPPED) -> PriceSheets:
    """Read a file. Raise PriceError with all problems at once."""
    try:
        document = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise PriceError(f"{path}: {error}") from None
    problems: list[str] = []

    def fields(table: Any, readers: dict[str, Reader], place: str) -> dict[str, Any]:
        """The table's fields as their readers give them. A wrong field is added to the problems."""
        if not isinstance(table, dict):
            problems.append(f"{place}must be a table")
            return {}
        problems.extend(f"{place}unknown field `{name}`" for name in table if name not in readers)
        sheets = {}
        for name, read in readers.items():
            if name in table or name not in _MAY_LACK:
                try:
                    sheets[name] = read(table.get(name))
                except ValueError as error:
                    problems.append(f"{place}{name}: {error}")
        return sheets

    file = fields(document, _FILE, "")
    entries = []
    for number, table in enumerate(file.get("price", ()), start=1):
        model = table.get("model") if isinstance(table, dict) else None
        is_line = isinstance(model, str) and model.isprintable()
        place = f"price {number} (`{model}`)" if is_line else f"price {number}"
        entry = fields(table, _ENTRY, f"{place}: ")
        bands = enumerate(entry.get("band", ()), start=1)
        entries.append((entry, [fields(band, _BAND, f"{place}, band {n}: ") for n, band in bands]))
    if "source" in document and "as_of" not in document:
        problems.append("as_of: must be the day of `source`, like 2026-01-31")
    counted = Counter((entry.get("model"), entry.get("from")) for entry, _ in entries)
    for (model, day), count in counted.items():
        if count > 1 and None not in (model, day):
            problems.append(f"price of `{model}` from {day}: is there {count} times")
    if problems:
        raise PriceError("\n".join(f"{path}: {problem}" for problem in problems))
    prices = [
        Price(
            model=entry["model"],
            valid_from=entry["from"],
            rates=_rates(entry),
            bands=tuple(
                Band(band["above_prompt_tokens"], _rates(band))
                for band in sorted(bands, key=lambda band: int(band["above_prompt_tokens"]))
            ),
            aliases=tuple(entry.get("aliases", ())),
        )
        for entry, bands in entries
    ]
    return PriceSheets(prices, file.get("source"), file.get("as_of"))


def _rates(table: dict[str, Any]) -> TokenPrices:
    writes = {ttl: table[name] for name, ttl in WRITES.items() if name in table}
    return TokenPrices(
        input=table["input"], writes=writes, read=table["read"], output=table["output"]
    )


class PriceBook:
    """The operator's prices and the published ones. `refresh` reads files that changed."""

    def __init__(self, prices: Path | None = None, hosted: Path | None = None) -> None:
        """Raise PriceError where a file is wrong."""
        self._paths = (prices or SHIPPED, hosted or HOSTED)
        self._stamps = [_stamp(path) for path in self._paths]
        self.own, self.hosted = (load_prices(path) for path in self._paths)

    @property
    def is_placeholder(self) -> bool:
        """Whether the operator's prices are the shipped ones, which are nobody's costs."""
        return self._paths[0] == SHIPPED

    def find(self, model: str, on: date) -> Price | None:
        """The operator's own price of a model on a day; None where it has none."""
        return self.own.find(model, on)

    def refresh(self) -> bool:
        """Read the files again if one of them has changed. Return whether they were read again.
        Raise PriceError where a file is wrong. Then the old prices stay."""
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._stamps:
            return False
        # The stamps are kept before the files are read, so that a wrong file is told only once.
        self._stamps = stamps
        prices, hosted = (load_prices(path) for path in self._paths)
        self.own = prices
        self.hosted = hosted
        return True

    async def run(self, stopping: asyncio.Event) -> None:
        """Refresh every few seconds until the gateway stops. Log wrong files."""
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
        stat = path.stat()
    except OSError:
        return None
    return stat.st_mtime_ns, stat.st_size
