"""A table of figures: what a page says, what SQL says, and what was counted outside."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

Value = float | int | str | None


@dataclass(frozen=True, kw_only=True)
class Figure:
    """`sql` or `outside` is None where that can't tell the figure. `within` is the part by which
    they may differ, and `apart` the amount: a figure is told with so many digits."""

    page: str
    name: str
    shown: Value
    sql: Value
    outside: Value
    within: float
    apart: float

    def is_right(self) -> bool:
        """Whether what is known of it is what the page says; something must be known."""
        references = [value for value in (self.sql, self.outside) if value is not None]
        return bool(references) and all(
            _agree(self.shown, value, self.within, self.apart) for value in references
        )


def _agree(value: Value, reference: Value, within: float, apart: float) -> bool:
    if isinstance(value, str) or isinstance(reference, str) or value is None or reference is None:
        return value == reference
    return bool(reference == pytest.approx(value, rel=max(within, 1e-9), abs=max(apart, 1e-9)))


@dataclass
class Table:
    """`named` are the cards and the columns of each page that a figure tells of."""

    figures: list[Figure] = field(default_factory=list)
    named: dict[str, set[str]] = field(default_factory=dict)

    def add(
        self,
        page: str,
        name: str,
        shown: Any,
        *,
        sql: Any = None,
        outside: Any = None,
        within: float = 0.0,
        apart: float = 0.0,
        of: str | None = None,
    ) -> None:
        """`of`: the card or column that it is of, where the name says more."""
        figure = Figure(
            page=page,
            name=name,
            shown=shown,
            sql=sql,
            outside=outside,
            within=within,
            apart=apart,
        )
        self.figures.append(figure)
        self.named.setdefault(page, set()).add(of or name)

    def missing(self, page: str, app: AppTest) -> set[str]:
        """The cards of a page, and the columns of numbers of its tables, without a figure."""
        drawn = {metric.label for metric in app.metric}
        for frame in app.dataframe:
            drawn |= set(frame.value.select_dtypes("number").columns)
        return drawn - self.named.get(page, set())

    def text(self) -> str:
        """The table, with a mark before each line that is wrong."""
        lines = [("", "page", "figure", "page's value", "SQL", "counted outside")]
        for figure in self.figures:
            mark = "" if figure.is_right() else "!"
            values = (figure.shown, figure.sql, figure.outside)
            lines.append((mark, figure.page, figure.name, *map(_in_words, values)))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
            for line in lines
        )

    def wrong(self) -> list[Figure]:
        return [figure for figure in self.figures if not figure.is_right()]

    def counts(self) -> dict[str, int]:
        """How many figures each page has."""
        return dict(Counter(figure.page for figure in self.figures))


def _in_words(value: Value) -> str:
    if value is None:
        return "–"
    return f"{value:.6g}" if isinstance(value, float) else str(value)
