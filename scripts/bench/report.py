"""What every benchmark prints by: a table, percentiles, and the machine it ran on."""

import os
import platform
import sys
from collections.abc import Iterable, Sequence


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


def percentile(values: Sequence[float], share: float) -> float:
    """The value that `share` (0 to 1) of the others lie below; not a number where there is none."""
    ordered = sorted(values)
    return ordered[int(share * (len(ordered) - 1))] if ordered else float("nan")


def machine_line() -> str:
    """Torch's threads and version too, where the benchmark has loaded it."""
    parts = [platform.machine(), f"{os.cpu_count()} CPUs", f"Python {platform.python_version()}"]
    torch = sys.modules.get("torch")
    if torch is not None:
        parts += [f"torch {torch.__version__}", f"{torch.get_num_threads()} torch threads"]
    return ", ".join(parts)
