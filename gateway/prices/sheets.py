"""The prices of one file, found by model and day. Pure."""

from collections.abc import Iterable
from datetime import date
from fnmatch import fnmatchcase
from functools import lru_cache

from gateway.prices.price import Price

_MAX_REMEMBERED = 1024


class PriceSheets:
    """All prices of a file. `source` and `as_of` say where and when published prices were read."""

    def __init__(
        self, prices: Iterable[Price], source: str | None = None, as_of: date | None = None
    ) -> None:
        self.source, self.as_of = source, as_of
        self.all = sorted(prices, key=lambda price: (price.model, price.valid_from))
        # Turns of an earlier version have ids without a digest.
        self._of_id = {price.id.partition("#")[0]: price for price in self.all}
        self._of_id |= {price.id: price for price in self.all}
        # Every turn looks up its model. Clients choose the ids, so the number of remembered ids is
        # bounded.
        self._find_once = lru_cache(maxsize=_MAX_REMEMBERED)(self._find)

    def find(self, model: str, on: date) -> Price | None:
        """The model's price on that day.

        If several models' aliases match, the first model by name counts.
        """
        return self._find_once(model, on)

    def _find(self, model: str, on: date) -> Price | None:
        valid = [price for price in self.all if price.valid_from <= on]
        named = [price for price in valid if price.model == model]
        if not named:
            aliased = [p for p in valid if any(fnmatchcase(model, glob) for glob in p.aliases)]
            named = [price for price in aliased if price.model == aliased[0].model]
        return named[-1] if named else None

    def with_id(self, price_id: str) -> Price | None:
        """The price with this id, if it is still in the file."""
        return self._of_id.get(price_id)

    def current(self, on: date) -> list[Price]:
        """Each model's price on that day."""
        return list({price.model: price for price in self.all if price.valid_from <= on}.values())
