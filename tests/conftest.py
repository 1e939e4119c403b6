"""What every test shares."""

import functools
import os
import ssl
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from uuid import uuid4

import pytest
from hypothesis import Phase, settings

import tests.unneeded  # noqa: F401  it keeps packages from being imported
from scripts import stack
from tests import forked
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
    """See tests/forked.py."""
    forked.first_environment()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stack, "Popen", forked.ForkingPopen)
        yield
    forked.end()


@pytest.fixture(scope="session", autouse=True)
def gateways_share_what_they_begin_with() -> Iterator[None]:
    """See tests/gateways.py. Beside vLLM there is no gateway."""
    if find_spec("alembic") is None:
        yield
        return
    from tests.gateways import described_once, migrated_once

    with migrated_once(), described_once():
        yield


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
