"""Where the service is. `scripts/long_tests clients` starts it and installs the clients."""

import os

import pytest

from tests.clients.conversation import Service


@pytest.fixture
def service() -> Service:
    url = os.environ.get("CLIENT_TESTS_URL")
    if not url:
        pytest.skip("the clients are not installed; scripts/long_tests clients runs it")
    return Service(url, os.environ["CLIENT_TESTS_KEY"])
