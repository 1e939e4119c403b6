"""No engine of a test is left running."""

from collections.abc import Iterator

import pytest

from tests.engine.store.engines import StoredEngine


@pytest.fixture(autouse=True)
def engines_end() -> Iterator[None]:
    yield
    for engine in list(StoredEngine.running):
        engine.kill()
    StoredEngine.running.clear()
