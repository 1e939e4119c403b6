"""What a row of a chart or a table is, and values that many of them have. Pure."""

from collections.abc import Mapping
from datetime import datetime
from typing import Any

from dashboard.ui.formats import NANO

Row = Mapping[str, Any]
"""Values by column: a title that a table shows, or a field that a chart draws."""


def in_dollars(nano: int | None) -> float | None:
    """Nano-dollars in dollars."""
    return None if nano is None else nano / NANO


def without_zone(moment: datetime | None) -> datetime | None:
    """The moment without its zone, which the column's title tells."""
    return None if moment is None else moment.replace(tzinfo=None)
