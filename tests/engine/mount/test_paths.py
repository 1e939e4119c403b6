"""With `--root-path` the mount answers where vLLM's own routes do."""

import asyncio
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from engine.mount.endpoint import path_below


async def vllms_own(request: Request) -> PlainTextResponse:
    return PlainTextResponse("models")


async def answer(root_path: str, path: str) -> str:
    """What a server with our mount beside a route of its own says; the path that we saw, or 404."""

    async def ours(scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse(f"ours {path_below(scope)}")(scope, receive, send)

    app = Starlette(routes=[Route("/v1/models", vllms_own)])
    app.mount("/holdfast", ours, name="holdfast")
    scope = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "root_path": root_path,
        "query_string": b"",
        "headers": [],
    }
    body = bytearray()

    async def send(message: Any) -> None:
        body.extend(message.get("body", b""))

    async def receive() -> Any:
        return {"type": "http.request"}

    await app(scope, receive, send)
    return body.decode()


@pytest.mark.parametrize("root_path", ["", "/vllm", "/a/b"])
@pytest.mark.parametrize(
    ("path", "answer_path"),
    [
        ("/v1/models", "models"),
        ("/holdfast/readyz", "ours /readyz"),
        ("/holdfast/v1/generate", "ours /v1/generate"),
        ("/holdfast", "ours /"),
        ("/holdfast/", "ours /"),
        ("/holdfast/holdfast/x", "ours /holdfast/x"),
    ],
)
def test_the_mount_answers_with_and_without_the_prefix(
    root_path: str, path: str, answer_path: str
) -> None:
    assert asyncio.run(answer(root_path, path)) in (answer_path, "")
    assert asyncio.run(answer(root_path, root_path + path)) == asyncio.run(answer(root_path, path))
    if path != "/holdfast":  # Starlette redirects it
        assert asyncio.run(answer(root_path, path)) == answer_path
