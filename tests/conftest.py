"""What every test shares."""

from collections.abc import Iterator

import pytest

from tests.postgres import running_postgres


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(scope="session")
def postgres() -> Iterator[str]:
    """A server's URL without a database name; skips where there is no PostgreSQL."""
    with running_postgres() as url:
        yield url
