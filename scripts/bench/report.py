"""What benchmarks print with: tables, percentiles, and the machine's line."""

import os
import platform
import sys
from collections.abc import Iterable, Sequence

import numpy as np


def table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A text table. The first column is aligned to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(headings, *rows, strict=True)]
    lines = []
    for label, *figures in (headings, *rows):
        cells = [cell.rjust(width) for cell, width in zip(figures, widths[1:], strict=True)]
        lines.append("  ".join([label.ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


def markdown(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    head, *lines = (f"| {' | '.join(map(str, row))} |" for row in (headings, *rows))
    return "\n".join([head, "|---" * len(headings) + "|", *lines])


def percentile(values: Sequence[float], share: float) -> float:
    """The quantile at `share` (0 to 1); not a number if there is no value.

    It is the median-unbiased estimate that Hyndman and Fan recommend, number 8 of "Sample Quantiles
    in Statistical Packages". The p95 of 13 values or fewer is the largest.
    """
    if not values:
        return float("nan")
    return float(np.quantile(values, share, method="median_unbiased"))


def machine_line() -> str:
    """The machine and Python, and torch's version and threads if the benchmark has loaded torch."""
    parts = [platform.machine(), f"{os.cpu_count()} CPUs", f"Python {platform.python_version()}"]
    torch = sys.modules.get("torch")
    if torch is not None:
        parts += [f"torch {torch.__version__}", f"{torch.get_num_threads()} torch threads"]
    return ", ".join(parts)
