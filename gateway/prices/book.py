"""The operator's own prices and the published ones, read again when their files change.

Both files have the same form. The operator's own prices make a turn's cost. Published prices of
hosted models are for comparison only: what would the same traffic have cost there?
"""

import asyncio
from datetime import date
from pathlib import Path

from gateway.base.background import pause
from gateway.base.logs import get_logger
from gateway.prices.files import HOSTED, SHIPPED, PriceError, load_prices
from gateway.prices.price import Price

_REFRESH_SECONDS = 5.0


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
