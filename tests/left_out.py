"""A pytest plugin that ends a run with what was left out: each test by name, with the reason.

It works beside pytest-xdist too: each worker collects all tests and tells what it deselected, and
what it skipped while it collected, to the process that started it.
"""

from collections import Counter, defaultdict

import pytest

SLOW = "slow; run by scripts/test --all"
KEY = "left_out"
# So many with one reason are told by their files.
MANY = 30


class LeftOut:
    def __init__(self) -> None:
        self.names: dict[str, set[str]] = defaultdict(set)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            self._add(report.longrepr, report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._add(report.longrepr, report.nodeid)

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            if item.get_closest_marker("slow"):
                self.names[SLOW].add(item.nodeid)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        output = getattr(session.config, "workeroutput", None)
        if output is not None:
            output[KEY] = {reason: sorted(names) for reason, names in self.names.items()}

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        for reason, names in getattr(node, "workeroutput", {}).get(KEY, {}).items():
            self.names[reason].update(names)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        count = sum(map(len, self.names.values()))
        terminalreporter.section(f"left out here: {count}")
        for reason, names in sorted(self.names.items()):
            terminalreporter.write_line(f"{reason} ({len(names)})")
            for line in lines_of(names):
                terminalreporter.write_line(f"  {line}")

    def _add(self, longrepr: object, nodeid: str) -> None:
        # A skip's long representation is (path, line, reason).
        reason = longrepr[2] if isinstance(longrepr, tuple) else str(longrepr)
        self.names[reason.removeprefix("Skipped: ")].add(nodeid)


def lines_of(names: set[str]) -> list[str]:
    """The tests by name; where they are too many to read, their files with how many of each."""
    if len(names) <= MANY:
        return sorted(names)
    files = Counter(name.partition("::")[0] for name in names)
    return [f"{file} ({count})" for file, count in sorted(files.items())]


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(LeftOut(), "left-out")
