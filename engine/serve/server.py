"""The engine's HTTP application: the calls of `PROTOCOL.md` over one backend."""

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Annotated, Any, TypeVar

import msgspec
import structlog
from litestar import Litestar, MediaType, Request, Response, Router, delete, get, post
from litestar.connection import ASGIConnection
from litestar.datastructures import State
from litestar.di import NamedDependency, Provide
from litestar.exceptions import HTTPException, InternalServerException
from litestar.handlers import BaseRouteHandler, HTTPRouteHandler
from litestar.params import FromPath, FromQuery, QueryParameter, RawBody
from litestar.response import Stream
from structlog.contextvars import bind_contextvars, get_contextvars

from engine import metrics
from engine.asgi import Application, CallerLeft, while_connected
from engine.backends.base import Generation
from engine.backends.contract import EngineBackend
from engine.backends.decoding import decoded
from engine.errors import EngineError, NotReady, Unauthorized
from engine.protocol import (
    EPOCH_HEADER,
    SCOPE_HEADER,
    STATUS_OF,
    AckRequest,
    CancelReply,
    CancelRequest,
    ChainHeld,
    ClockAdvance,
    ClockReply,
    CountReply,
    DropReply,
    DropRequest,
    ErrorCode,
    ErrorReply,
    EventFrame,
    Failed,
    FinalCounts,
    KeptRecord,
    LoadRequest,
    NamesRequest,
    PurgeReply,
    PurgeRequest,
    Snapshot,
)
from engine.protocol.reports import AdapterInfo, Description, EntryInfo, Memory, Stats
from engine.serve.health import ServedEngine
from engine.serve.secret import Secret
from engine.supervisor import trace_of

T = TypeVar("T")
_REQUEST_ID = re.compile(rb"[A-Za-z0-9_.-]{1,64}")
log = structlog.get_logger()

NDJSON = "application/x-ndjson"
MAX_BODY_BYTES = 64 * 1024 * 1024
NAMES_A_PIECE = 4096
REFUSAL_LEVELS = {"overloaded": logging.DEBUG, "not_ready": logging.DEBUG}
"""The log levels of refusals that may come in floods. All others are logged as `info`."""


Served = NamedDependency[EngineBackend]


# The scope in the header shares the workers fairly before a body is read. All requests without the
# header count as one scope.


@post("/generate", status_code=200)
async def generate(body: RawBody, request: Request[Any, Any, Any], backend: Served) -> Stream:
    backend.check_epoch(request.headers.get(EPOCH_HEADER, ""))
    opening = backend.open(body, request.headers.get(SCOPE_HEADER, ""))
    lines = _frame_lines(await while_connected(request.receive, opening))
    return Stream(lines, media_type=NDJSON)


@post("/count", status_code=200)
async def count(body: RawBody, request: Request[Any, Any, Any], backend: Served) -> CountReply:
    return await while_connected(
        request.receive, backend.count(body, request.headers.get(SCOPE_HEADER, ""))
    )


@post("/cancel", status_code=200)
async def cancel(body: RawBody, backend: Served) -> CancelReply:
    return CancelReply(await backend.cancel(decoded(body, CancelRequest).request_id))


@get("/describe")
async def describe(backend: Served) -> Description:
    return backend.describe()


@get("/unacknowledged")
async def unacknowledged(backend: Served) -> list[FinalCounts]:
    return await backend.unacknowledged()


@post("/ack", status_code=204)
async def acknowledge(body: RawBody, backend: Served) -> None:
    await backend.acknowledge(decoded(body, AckRequest).request_ids)


@post("/records", status_code=200)
async def records(body: RawBody, backend: Served) -> list[KeptRecord]:
    return await backend.records(decoded(body, AckRequest).request_ids)


@get("/events")
async def events(
    backend: Served, epoch: FromQuery[str | None] = None, after: FromQuery[int | None] = None
) -> Stream:
    return Stream(_event_lines(backend.events(epoch, after)), media_type=NDJSON)


@get("/snapshot")
async def snapshot(backend: Served) -> Stream:
    pieces = snapshot_pieces(await backend.snapshot())
    return Stream(_one_by_one(pieces), media_type=MediaType.JSON)


@get("/entries")
async def entries(
    backend: Served,
    # A parameter called `scope` would be the ASGI connection's.
    cache_scope: Annotated[str | None, QueryParameter(name="scope")] = None,
    limit: Annotated[int | None, QueryParameter(name="limit", ge=1)] = None,
    after: FromQuery[str | None] = None,
) -> list[EntryInfo]:
    return await backend.entries(cache_scope, limit, after)


@post("/names", status_code=200)
async def names(body: RawBody, backend: Served) -> list[ChainHeld]:
    return backend.held(decoded(body, NamesRequest).names)


@get("/stats")
async def stats(backend: Served) -> Stats:
    return await backend.stats()


@get("/memory")
async def memory(backend: Served) -> Memory:
    return await backend.memory()


@post("/drop", status_code=200)
async def drop(body: RawBody, backend: Served) -> DropReply:
    return await backend.drop(decoded(body, DropRequest))


@post("/purge", status_code=200)
async def purge(body: RawBody, backend: Served) -> PurgeReply:
    return await backend.purge(decoded(body, PurgeRequest))


@post("/adapters", status_code=200)
async def load_adapter(body: RawBody, backend: Served) -> AdapterInfo:
    return await backend.load_adapter(decoded(body, LoadRequest).name)


@delete("/adapters/{name:str}", status_code=200)
async def unload_adapter(name: FromPath[str], backend: Served) -> AdapterInfo:
    return await backend.unload_adapter(name)


@post("/clock/advance", status_code=200)
async def advance_clock(body: RawBody, backend: Served) -> ClockReply:
    return ClockReply(await backend.advance_clock(decoded(body, ClockAdvance).seconds))


@get("/healthz")
async def healthz() -> dict[str, str]:
    return {"status": "ok"}


@get("/readyz")
async def readyz(host: NamedDependency[ServedEngine]) -> Response[dict[str, Any]]:
    body = msgspec.to_builtins(host.readiness)
    return Response(body, status_code=200 if host.readiness.ready else 503)


@get("/metrics")
async def render_metrics(
    backend: Served, host: NamedDependency[ServedEngine], state: State
) -> Response[bytes]:
    is_ready = host.readiness.stage == "ready"
    stats = await backend.stats() if is_ready else None
    # Gateways call a model by the last part of its path.
    model = backend.describe().model.rstrip("/").rpartition("/")[2] if is_ready else ""
    text = metrics.render(stats, host.supervisor.ends, model, as_vllm=state.as_vllm)
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")


async def _frame_lines(generation: Generation) -> AsyncIterator[bytes]:
    """The frames as NDJSON. A None of the generation, which only shows life, is a blank line."""
    encoder = msgspec.json.Encoder()
    try:
        async for frame in generation:
            if isinstance(frame, Failed) and frame.code != "cancelled":
                log.warning("generation failed", code=frame.code)
            yield b"\n" if frame is None else encoder.encode(frame) + b"\n"
    finally:
        generation.close()


async def _event_lines(frames: AsyncIterator[EventFrame]) -> AsyncIterator[bytes]:
    encoder = msgspec.json.Encoder()
    async for frame in frames:
        if isinstance(frame, Snapshot):
            async for piece in _one_by_one(snapshot_pieces(frame)):
                yield piece
            yield b"\n"
        else:
            yield encoder.encode(frame) + b"\n"


def snapshot_pieces(snapshot: Snapshot) -> Iterator[bytes]:
    """A snapshot as JSON, in pieces of about NAMES_A_PIECE names. Each takes a millisecond."""
    head = msgspec.json.encode(msgspec.structs.replace(snapshot, chains=[]))
    assert head.endswith(b"[]}"), "the chains are the last field"
    yield head[:-2]
    separator = b""
    begin = 0
    num_names = 0
    for end, chain in enumerate(snapshot.chains, 1):
        num_names += len(chain.names)
        if num_names >= NAMES_A_PIECE or end == len(snapshot.chains):
            yield separator + msgspec.json.encode(snapshot.chains[begin:end])[1:-1]
            separator = b","
            begin = end
            num_names = 0
    yield b"]}"


async def _one_by_one(pieces: Iterator[bytes]) -> AsyncIterator[bytes]:
    """The pieces, with a round of the event loop after each. Sending alone may give it none."""
    for piece in pieces:
        yield piece
        await asyncio.sleep(0)


def _backend_of(state: State) -> Any:
    return state.backend


def _host_of(state: State) -> Any:
    return state.host


def _render_error(_request: Request[Any, Any, Any], error: Exception) -> Response[ErrorReply]:
    code: ErrorCode
    is_public = False
    only_this = False
    match error:
        case EngineError():
            code = error.code
            message = str(error)
            status = error.status
            is_public = error.is_public
            only_this = error.only_this
            # The message may have words of the prompt's tools and schemas.
            log.log(REFUSAL_LEVELS.get(code, logging.INFO), "call refused", code=code)
        case CallerLeft():
            code = "cancelled"
            message = "the caller left"
            status = STATUS_OF["cancelled"]
        case HTTPException() if error.status_code < 500:
            code = "not_found" if error.status_code == 404 else "invalid_request"
            message = error.detail
            status = error.status_code
            if error.status_code == 404:
                message = "no call of the engine protocol: clients ask a gateway, not an engine"
        case InternalServerException(detail="client disconnected prematurely"):
            # The body was incomplete, so nothing was begun. Nobody reads this answer, because the
            # caller is gone.
            code = "invalid_request"
            message = "the body ended early"
            status = 499
        case _:
            log.error("call failed", trace=trace_of(error))
            code = "internal"
            message = "internal error"
            status = 500
    return Response(ErrorReply(code, message, is_public, only_this), status_code=status)


def create_app(
    backend_of: Callable[[ServedEngine], EngineBackend],
    secret: str,
    host: ServedEngine,
    *,
    as_vllm: bool = False,
) -> Litestar:
    """The application over one backend, which is made and loaded when the server starts.

    With `as_vllm` the metrics are there under vLLM's names as well.
    """

    engine_secret = Secret(secret)

    def check_secret(connection: ASGIConnection[Any, Any, Any, Any], _: BaseRouteHandler) -> None:
        if not engine_secret.is_shown(connection.scope["headers"]):
            raise Unauthorized("the engine secret is missing or wrong")
        if host.is_ending:
            raise NotReady(f"the engine has failed ({host.readiness.error})")

    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        app.state.host = host
        app.state.as_vllm = as_vllm
        app.state.backend = backend_of(host)
        async with host.running(app.state.backend):
            yield

    calls: list[HTTPRouteHandler] = [generate, count, cancel, describe, unacknowledged, acknowledge]
    calls += [records, events, snapshot, entries, names, stats, memory, drop, purge]
    calls += [load_adapter, unload_adapter, advance_clock]
    guarded = Router(path="/v1", guards=[check_secret], route_handlers=calls)
    return Litestar(
        [guarded, healthz, readyz, render_metrics],
        lifespan=[lifespan],
        dependencies={
            "backend": Provide(_backend_of, sync_to_thread=False),
            "host": Provide(_host_of, sync_to_thread=False),
        },
        exception_handlers={Exception: _render_error, HTTPException: _render_error},
        middleware=[with_request_id],
        request_max_body_size=MAX_BODY_BYTES,
        openapi_config=None,
        # The process and its root logger may belong to another program.
        logging_config=None,
    )


def with_request_id(app: Application) -> Application:
    """Middleware: each line that is logged while a call is served has the caller's `request_id`.

    An id that does not match _REQUEST_ID is ignored.
    """

    async def call(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            request_id = next(
                (value for name, value in scope["headers"] if name == b"x-request-id"), b""
            )
            if _REQUEST_ID.fullmatch(request_id):
                bind_contextvars(request_id=request_id.decode())
        await app(scope, receive, send)

    return call


def note_call(scope: Any, facts: dict[str, Any]) -> None:
    """Log an answered call of the protocol. Probes and metrics are not logged.

    Calls without an id are not logged either: they are a gateway's polls and acknowledgements.
    """
    if scope["path"].startswith("/v1/") and "request_id" in get_contextvars():
        log.debug("call", **facts)
