"""One native engine with the demo model and one gateway, for official SDKs alone."""

from collections.abc import Iterator

import pytest
from anthropic import Anthropic
from openai import OpenAI

from scripts.stack import API_KEY, Stack, running_stack


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    keeps = {"HOLDFAST_RESPONSE_DAYS": "1"}
    with running_stack(tmp_path_factory.mktemp("data"), gateway_settings=keeps) as running:
        yield running


@pytest.fixture
def openai(stack: Stack) -> Iterator[OpenAI]:
    url = f"{stack.gateway}/v1"
    with OpenAI(base_url=url, api_key=API_KEY, timeout=300, max_retries=0) as client:
        yield client


@pytest.fixture
def client(stack: Stack) -> Iterator[Anthropic]:
    with Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=120, max_retries=0) as client:
        yield client
