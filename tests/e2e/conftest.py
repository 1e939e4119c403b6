"""One native engine with the demo model and one gateway for all tests of this folder."""

from collections.abc import Iterator

import pytest
from anthropic import Anthropic

from scripts.stack import API_KEY, Stack, running_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("data")) as running:
        yield running


@pytest.fixture(scope="session")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """An engine whose answers last as long as a test wants."""
    with running_stack(tmp_path_factory.mktemp("synthetic"), backend="synthetic") as running:
        yield running


@pytest.fixture
def client(stack: Stack) -> Iterator[Anthropic]:
    with Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=120, max_retries=0) as client:
        yield client
