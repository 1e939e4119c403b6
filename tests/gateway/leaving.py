"""A client that asks and leaves when the test says so, not when some time is over."""

import json
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from typing import Any

from tests.gateway.serving import API_KEY


@contextmanager
def asking(url: str, path: str, body: dict[str, Any]) -> Iterator[None]:
    """Send a request and read no answer; the connection is closed at the end of the context."""
    headers = {
        "x-api-key": API_KEY,
        "anthropic-version": "2023-06-01",
        "content-type": "application/json",
    }
    with closing(HTTPConnection(url.removeprefix("http://"), timeout=120)) as connection:
        connection.request("POST", path, json.dumps(body), headers)
        yield
