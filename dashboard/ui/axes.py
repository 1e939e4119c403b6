"""Axes whose domain is finite and whose labels are all different, whatever is drawn. Pure.

Vega picks ticks by itself and then writes them in a fixed form: `$300m` for 30 cents, the same hour
twice, `NaN` without data. Here the ticks are chosen first, and the form that tells them apart.
"""

import math
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any, NamedTuple

import altair as alt

MAX_TIMES = 7
_STEPS_SECONDS = (
    *(1, 5, 10, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10_800, 21_600, 43_200),
    *(86_400, 2 * 86_400, 4 * 86_400, 7 * 86_400, 14 * 86_400, 30 * 86_400, 90 * 86_400),
    *(365 * 86_400,),
)
_DAY_SECONDS = 86_400
# A thousandth of a nano-dollar: smaller amounts are drawn as none.
_NOTHING = 1e-12


class Amounts(NamedTuple):
    """A linear axis: its domain, its ticks, and the d3 format of their labels."""

    domain: list[float]
    ticks: list[float]
    form: str

    def scale(self) -> alt.Scale:
        return alt.Scale(domain=self.domain, nice=False)

    def axis(self, **options: Any) -> alt.Axis:
        """A plain 0 where the form would write 0k or $0.00."""
        unit = "$" if self.form.startswith("$") else ""
        return alt.Axis(
            values=self.ticks,
            format=self.form,
            labelExpr=f"datum.value === 0 ? '{unit}0' : datum.label",
            labelOverlap=False,
            **options,
        )


def amounts(values: Iterable[float], *, unit: str = "", whole: bool = False) -> Amounts:
    """The axis of these values, 0 among them. `whole`: there are no halves of what is counted."""
    found = [float(value) for value in values if value is not None and math.isfinite(value)]
    low, high = min([0.0, *found]), max([0.0, *found])
    if high - low < _NOTHING:
        low, high = 0.0, 1.0
    step = _nice((high - low) / 4)
    if whole:
        step = max(step, 1.0)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = [round(number * step, 12) for number in range(first, last + 1)]
    return Amounts([ticks[0], ticks[-1]], ticks, unit + _form(step, max(-low, high)))


def _nice(raw: float) -> float:
    """The next of 1, 2, 2.5 and 5 times a power of ten."""
    power = 10.0 ** math.floor(math.log10(raw))
    return next(step * power for step in (1, 2, 2.5, 5, 10) if step * power >= raw * (1 - 1e-9))


def _form(step: float, high: float) -> str:
    """Enough digits to tell two neighbours apart: 0.05, 1,500, 20k, 2.5M."""
    if high >= 10_000:
        return "~s"
    digits = 0
    while digits < 12 and (
        step * 10**digits < 1 - 1e-9 or abs(step * 10**digits - round(step * 10**digits)) > 1e-6
    ):
        digits += 1
    return f",.{digits}f"


class Times(NamedTuple):
    """An axis of moments in UTC: both ends, the ticks, and the form of their labels."""

    since: datetime
    until: datetime
    ticks: list[datetime]
    form: str


def times(since_ms: int, until_ms: int) -> Times:
    """At most MAX_TIMES round moments of the range."""
    seconds = max((until_ms - since_ms) / 1000, 1.0)
    step = next((s for s in _STEPS_SECONDS if seconds / s <= MAX_TIMES), _STEPS_SECONDS[-1])
    if seconds > 1.5 * _DAY_SECONDS:
        step = max(step, _DAY_SECONDS)
    step_ms = step * 1000
    first = -(-since_ms // step_ms) * step_ms
    start = datetime(1970, 1, 1, tzinfo=UTC)
    ticks = [start + timedelta(milliseconds=tick) for tick in range(first, until_ms + 1, step_ms)]
    if step >= 365 * _DAY_SECONDS:
        form = "%b %Y"
    elif step >= _DAY_SECONDS:
        form = "%d %b"
    else:
        form = "%H:%M" if step >= 60 else "%H:%M:%S"
    return Times(
        start + timedelta(milliseconds=since_ms),
        start + timedelta(milliseconds=max(until_ms, since_ms + 1000)),
        ticks,
        form,
    )


class Decades(NamedTuple):
    """A logarithmic axis: its domain and its ticks."""

    domain: list[float]
    ticks: list[float]

    def scale(self) -> alt.Scale:
        return alt.Scale(type="log", domain=self.domain, nice=False)


def decades(values: Iterable[float]) -> Decades:
    """1 and 3 of each power of ten around these values; 1 to 10 without any."""
    found = [value for value in values if value > 0 and math.isfinite(value)]
    low, high = (min(found), max(found)) if found else (1.0, 10.0)
    first, last = math.floor(math.log10(low) - 1e-9), math.ceil(math.log10(high) + 1e-9)
    steps = [round(10.0**power * step, 12) for power in range(first, last + 1) for step in (1, 3)]
    below = [step for step in steps if step <= low * 0.98] or steps[:1]
    above = [step for step in steps if step >= high * 1.02] or steps[-1:]
    ticks = [step for step in steps if below[-1] <= step <= above[0]]
    return Decades([ticks[0], ticks[-1]], ticks)


PLAIN_LABEL = "format(datum.value, datum.value < 1 ? '~r' : ',')"
"""A label of a logarithmic axis: 0.03, 1, 3,000; never 3e+3."""
SHORT_LABEL = "format(datum.value, datum.value < 1000 ? ',' : '~s')"
"""A label of a logarithmic axis of counts: 300, 1k, 30k."""
