"""HEAD is answered as GET is, without a body."""

import pytest

from tests.gateway.conftest import Stack


@pytest.mark.parametrize(
    "path, status", [("/healthz", 200), ("/v1/models", 200), ("/v1/messages", 405), ("/none", 404)]
)
def test_head_has_the_status_and_headers_of_get_and_no_body(
    stack: Stack, path: str, status: int
) -> None:
    with stack.http() as http:
        head, get = http.head(path), http.get(path)
        assert (head.status_code, get.status_code) == (status, status)
        assert head.content == b"" and get.content
        assert head.headers["content-type"] == get.headers["content-type"]
        assert head.headers.get("allow") == get.headers.get("allow")
        # The connection is still good for the next request.
        assert http.get("/healthz").status_code == 200


def test_head_needs_a_key_where_get_does(stack: Stack) -> None:
    with stack.http("wrong") as http:
        assert http.head("/v1/models").status_code == 401
