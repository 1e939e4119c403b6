"""What every dialect's generating call needs: a readable body, a turn that was taken, its end."""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec
from litestar import Request
from litestar.background_tasks import BackgroundTask
from litestar.response.base import ASGIResponse
from litestar.response.streaming import ASGIStreamingResponse

from engine.protocol import Frame
from gateway.base.errors import EngineFailed, UnsupportedMedia
from gateway.prompt.ask import Principal
from gateway.turn.turn import Taken

KeyRequest = Request[Principal, None, Any]
Items = AsyncGenerator[Taken | list[Frame], None]

_encode = msgspec.json.Encoder().encode
_STREAM_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


def check_media(request: Request[Any, Any, Any]) -> None:
    """JSON in UTF-8, not compressed: anything else is named instead of guessed at."""
    kind, _, parameters = request.headers.get("content-type", "").partition(";")
    if kind.strip().lower() != "application/json":
        raise UnsupportedMedia
    for parameter in parameters.split(";"):
        name, _, value = parameter.partition("=")
        charset = value.strip().strip('"').lower()
        if name.strip().lower() == "charset" and charset not in ("utf-8", "utf8"):
            raise UnsupportedMedia("content-type: charset must be utf-8")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise UnsupportedMedia("content-encoding: compressed bodies are not supported")


async def until_taken(items: Items) -> Taken:
    """Wait until an engine has the turn: until then a failure is the response's status."""
    taken = await anext(items)
    if not isinstance(taken, Taken):
        raise EngineFailed
    return taken


def answered(body: msgspec.Struct) -> ASGIResponse:
    """The whole answer, as JSON."""
    return ASGIResponse(body=_encode(body), media_type="application/json")


def streamed(events: AsyncGenerator[bytes, None], items: Items) -> ASGIResponse:
    """Server-sent events; afterwards the turn ends at once, also where nobody read to its end."""
    return ASGIStreamingResponse(
        iterator=events,
        media_type="text/event-stream",
        headers=_STREAM_HEADERS,
        background=BackgroundTask(_close, items),
    )


async def _close(items: Items) -> None:
    await items.aclose()
