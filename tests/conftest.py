"""What every test shares."""

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import Phase, settings

from tests.postgres import new_database, running_postgres

# For scripts/faults/mutants.py: the same examples in every run, and the first failure is enough.
# To look for a smaller one takes minutes and says nothing more.
settings.register_profile(
    "mutants",
    parent=settings.get_profile("ci"),
    phases=(Phase.explicit, Phase.generate),
    report_multiple_bugs=False,
)


# These take longest, mostly by waiting: where several processes share the tests they come first.
LONG = ("tests/dashboard/", "tests/e2e/", "tests/fuzz/", "tests/isolation/", "tests/faults/")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: not item.nodeid.startswith(LONG))


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
