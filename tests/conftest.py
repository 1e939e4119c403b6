"""What every test shares."""

import functools
import gc
import os
import ssl
from collections import Counter
from collections.abc import Generator, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from hypothesis import Phase, settings

from scripts import stack
from tests.forking import ForkedServer, first_environment
from tests.postgres import new_database, running_postgres

# The same examples in every run, and no deadline: a busy machine is no failure.
settings.register_profile("usual", parent=settings.get_profile("ci"))
# New examples; scripts/long_tests asks for them, and scripts/setup/run_tests.py with a TEST_SEED.
settings.register_profile("fresh", parent=settings.get_profile("ci"), derandomize=False)
# For tests/faults/mutants.py: the first failure is enough. To look for a smaller one takes
# minutes and says nothing more.
settings.register_profile(
    "mutants",
    parent=settings.get_profile("ci"),
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
)
settings.load_profile("fresh" if os.environ.get("TEST_SEED") else "usual")


class FailureTeller:
    """Prints a failure when it happens: a run that is stopped has named what failed by then."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self._terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._terminal.write_line(f"\nFAILED {report.nodeid} ({report.when})")
            self._terminal.write_line(report.longreprtext[-2000:])


@pytest.hookimpl(trylast=True)  # behind the terminal's own
def pytest_configure(config: pytest.Config) -> None:
    terminal = config.pluginmanager.getplugin("terminalreporter")
    if "PYTEST_XDIST_WORKER" not in os.environ and terminal is not None:
        config.pluginmanager.register(FailureTeller(terminal))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is imported stays: the collector would take a quarter of the time to look through it
    again and again, and go on with it later."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


SHARING = ("tests/conformance/", "tests/e2e/sdk/", "tests/vectors/", "tests/isolation/")
# Whole installations and browsers: files of few tests that take as long as others with hundreds.
LONG = ("tests/dashboard/", "tests/e2e/", "tests/faults/", "tests/fuzz/", "tests/scripts/",
        "tests/upgrades/")  # fmt: skip


@pytest.hookimpl(trylast=True)  # behind the plugin that draws an order
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Long work goes first where several processes share it: at the end all have short files left.

    Needs `--no-loadscope-reorder`, since pytest-xdist would begin with the files of most tests.
    """
    if "PYTEST_XDIST_WORKER" not in os.environ:
        return
    sizes = Counter(file_of(item.nodeid) for item in items)

    def place(item: pytest.Item) -> tuple[bool, bool, int]:
        file = file_of(item.nodeid)
        return not file.startswith(SHARING), not file.startswith(LONG), -sizes[file]

    items.sort(key=place)


def file_of(nodeid: str) -> str:
    return nodeid.partition("::")[0]


@pytest.fixture(scope="session", autouse=True)
def certificates_are_read_once() -> Iterator[None]:
    """Every HTTP client would read all the world's certificates, 20 ms of CPU time, and use none.

    Thousands of clients are made here, and all speak plain HTTP on loopback.
    """
    with pytest.MonkeyPatch.context() as patch:
        made_once = functools.cache(ssl.create_default_context)
        patch.setattr(ssl, "create_default_context", made_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def servers_are_forked() -> Iterator[None]:
    """See tests/forking.py. A store of the usual 2 GiB has 262,144 of a small model's blocks, whose
    books take two seconds of CPU time for each tier."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINE_STORE_BYTES", str(64 << 20))
        first_environment()
        patch.setattr(stack, "Popen", ForkedServer)
        yield


@pytest.fixture(scope="session", autouse=True)
def ledgers_are_copied() -> Iterator[None]:
    """See tests/migrated.py: for `stack.migrate`, which looks the function up at each call."""
    if find_spec("alembic") is None:  # where vLLM's tests run
        yield
        return
    from tests import migrated

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("gateway.cli.migrate.migrate", migrated.migrate)
        yield


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """What shares servers by a session's fixture runs in one process, as does each file.

    `--dist loadgroup` of pytest-xdist 3.8 groups nothing under pytest 9.2, and does not say so.
    """
    from xdist.scheduler import LoadScopeScheduling  # not installed where vLLM's tests run

    class ByFile(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = file_of(nodeid)
            return next((folder for folder in SHARING if file.startswith(folder)), file)

    return ByFile(config, log)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A server's URL without a database name; skips where there is no PostgreSQL."""
    with running_postgres() as url:
        yield url


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.postgres)])
def shared_database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database that several gateways can share."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'shared.db'}"
    return new_database(request.getfixturevalue("postgres"), uuid4().hex)
