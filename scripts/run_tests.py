"""Run pytest and end with what was left out: each test by name, with the reason, and how many."""

import os
import shutil
import sys
from collections import defaultdict
from pathlib import Path

import pytest

CHROMIUM_NAMES = ("chromium", "chromium-headless-shell", "chromium-browser", "google-chrome")
ROOT = Path(__file__).resolve().parent.parent


class LeftOut:
    """A pytest plugin that collects skipped and deselected tests."""

    def __init__(self) -> None:
        self._by_reason: dict[str, list[str]] = defaultdict(list)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._add(report.longrepr, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._add(report.longrepr, report.nodeid)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("slow"):
                self._by_reason["slow; run by scripts/test --all"].append(item.nodeid)

    def _add(self, longrepr: object, nodeid: str) -> None:
        # A skip's long representation is (path, line, reason).
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        self._by_reason[reason.removeprefix("Skipped: ")].append(nodeid)

    def summary(self) -> str:
        count = sum(len(names) for names in self._by_reason.values())
        if not count:
            return "Nothing was skipped."
        lines = [f"Skipped here: {count}"]
        for reason, names in sorted(self._by_reason.items()):
            lines.append(f"  {reason} ({len(names)})")
            lines += [f"    {name}" for name in sorted(names)]
        return "\n".join(lines)


def find_chromium() -> str | None:
    return next((path for name in CHROMIUM_NAMES if (path := shutil.which(name))), None)


def main(arguments: list[str]) -> int:
    os.chdir(ROOT)
    sys.path[0] = str(ROOT)  # as `python -m pytest` would: the packages are imported from the tree
    chromium = os.environ.get("CHROMIUM") or find_chromium()
    if chromium:
        os.environ["CHROMIUM"] = chromium
    left_out = LeftOut()
    status = pytest.main(arguments, plugins=[left_out])
    print(f"\n{left_out.summary()}", flush=True)
    return int(status)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
