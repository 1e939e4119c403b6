"""A pytest plugin for several processes: tests that share servers run in one, the longest first.

A fixture of session scope exists once per process. A folder whose fixtures start engines and
gateways for all its files is therefore one unit of work; any other file is a unit of its own.
"""

import gc

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

# Folders whose files share servers of session scope (their conftest.py).
SHARING = (
    "tests/conformance/",
    "tests/vectors/",
    "tests/isolation/",
)
# The same for files: those of tests/e2e that use its `stack` and `synthetic`.
SHARING_FILES = {
    f"tests/e2e/test_{name}.py": "tests/e2e/conftest.py"
    for name in (
        "caching",
        "conversations",
        "disconnects",
        "forced_tools",
        "openai",
        "structured_output",
        "wire_vectors",
    )
}
# Units that take longest, mostly by waiting: they begin first, so that none of them ends last.
LONG = (
    "tests/dashboard/",
    "tests/e2e/",
    "tests/fuzz/",
    "tests/conformance/",
    "tests/vectors/",
    "tests/isolation/",
    "tests/faults/",
)


def unit(nodeid: str) -> str:
    """The unit of work that a test belongs to."""
    file = nodeid.partition("::")[0]
    folder = next((folder for folder in SHARING if file.startswith(folder)), None)
    return folder or SHARING_FILES.get(file, file)


class ByServers(LoadScopeScheduling):
    """xdist's scheduling by scope, where a scope is what shares servers."""

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> LoadScopeScheduling:
    return ByServers(config, log)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


def pytest_collection_finish() -> None:
    """What is loaded by now stays: the garbage collector need not look through it in every test."""
    gc.collect()
    gc.freeze()
