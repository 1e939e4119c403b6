"""What the check of a GPU has found: rows of subject and figure, written as they come.

Nothing of Triton is imported here: `--interpret` must be set before that is.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from scripts.bench.report import markdown


class Report:
    """Rows of subject and figure. `folder` None: they are printed alone.

    `facts` stand above the rows in the JSON: `chip`, `torch`, and what else is to be told.
    """

    def __init__(self, folder: Path | None, facts: dict[str, Any]) -> None:
        self._folder = folder
        self.facts = facts
        self.rows: list[tuple[str, str]] = []
        self.has_failed = False
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)

    def add(self, subject: str, figure: str) -> None:
        self.rows.append((subject, figure))
        print(f"{subject}: {figure}", flush=True)
        if self._folder is None:
            return
        text = json.dumps({**self.facts, "rows": self.rows}, indent=1)
        (self._folder / "gpu_check.json").write_text(text + "\n", "utf-8")
        heading = f"{self.facts['chip']}, torch {self.facts['torch']}"
        text = markdown((heading, "measured"), self.rows)
        (self._folder / "gpu_check.md").write_text(text + "\n", "utf-8")

    def fail(self, subject: str, failure: str) -> None:
        self.has_failed = True
        self.add(subject, f"failed: {failure}")


def failure_of(part: Callable[[], object]) -> str:
    """Run a part, whose errors must not take the other parts with them; "" or what failed."""
    try:
        part()
    except Exception as error:  # noqa: BLE001 - the edge of a part
        return why(error)
    return ""


def why(error: Exception) -> str:
    """The error's kind and its first line."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:160]}"
