"""The floor of `scripts.bench.gateway`: what the gateway's libraries cost without a gateway.

    python -m scripts.bench.gateway_floor PORT ENGINE_URL

Litestar under uvicorn passes bodies on through aiohttp and answers back: no keys, no parsing, no
routing, no journal, no metrics.
"""

import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import uvicorn
from litestar import Litestar, Request, Response, get, post
from litestar.params import RawBody
from litestar.response import Stream


@get("/readyz")
async def readyz() -> dict[str, bool]:
    return {"ready": True}


@post("/v1/chat/completions", status_code=200)
async def relay(request: Request[Any, Any, Any], body: RawBody) -> Response[Any]:
    state = request.app.state
    if "http" not in state:
        state.http = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
    answer = await state.http.post(f"{sys.argv[2]}/v1/chat/completions", data=body)
    if answer.content_type == "text/event-stream":
        return Stream(_pieces(answer), media_type="text/event-stream")
    return Response(await answer.read(), media_type="application/json")


async def _pieces(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    async for piece in answer.content.iter_any():
        yield piece


if __name__ == "__main__":
    app = Litestar([readyz, relay], openapi_config=None, logging_config=None)
    uvicorn.run(app, port=int(sys.argv[1]), log_config=None, access_log=False, ws="none")
