"""How often a fault is tried: little on every commit, as the fault table asks in `long_tests`."""

import os
from typing import TypeVar

T = TypeVar("T")


def number(small: T, full: T) -> T:
    return full if os.environ.get("FAULTS") == "full" else small


def told(row: str, **sizes: object) -> None:
    """Print what a row of the table came to; shown by `pytest -rP`."""
    print(f"{row}: " + ", ".join(f"{name} {value}" for name, value in sizes.items()))
