"""What every benchmark prints by: a table, percentiles, intervals, and the machine it ran on."""

import math
import os
import platform
import statistics
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Item = TypeVar("Item")


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as they need to be; the first to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for first, *others in (headings, *rows):
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head, *lines = (f"| {' | '.join(map(str, row))} |" for row in (headings, *rows))
    return "\n".join([head, "|---" * len(headings) + "|", *lines])


def table_of(items: Iterable[Item], columns: Mapping[str, str | Callable[[Item], str]]) -> str:
    """A row for each item. A column is its heading, and a format string or what writes the cell."""
    writers = [cell.format if isinstance(cell, str) else cell for cell in columns.values()]
    return table(list(columns), [[write(item) for write in writers] for item in items])


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of the others lie below; not a number where there is none."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median and the ends of its 95 % interval.

    The interval is that of order statistics, which assumes no shape of the values' distribution.
    Below 6 values it is all that there are.
    """
    ordered, count = sorted(values), len(values)
    rank, below = 0, 0.5**count
    while below < 0.025:
        rank += 1
        below += math.comb(count, rank) * 0.5**count
    cut = max(rank - 1, 0)
    return statistics.median(ordered), ordered[cut], ordered[count - 1 - cut]


def verdict(is_met: bool) -> str:
    return "met" if is_met else "MISSED"


def machine_line() -> str:
    """Torch's threads and version too, where the benchmark has loaded it."""
    parts = [platform.machine(), f"{os.cpu_count()} CPUs", f"Python {platform.python_version()}"]
    torch = sys.modules.get("torch")
    if torch is not None:
        parts += [f"torch {torch.__version__}", f"{torch.get_num_threads()} torch threads"]
    return ", ".join(parts)
