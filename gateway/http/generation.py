"""The steps that generating calls of all dialects share: read, wait for an engine, answer."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import msgspec
from litestar import Request
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

from gateway.admission.workers import INLINE_BYTES
from gateway.base.bounds import RequestBounds
from gateway.base.errors import ClientGone, GatewayError, InvalidRequest
from gateway.dialects import sse
from gateway.dialects.anthropic.request import Approximate
from gateway.dialects.collector import Findings, Writer
from gateway.dialects.lowering import RequestContext
from gateway.http.bodies import brought_in
from gateway.http.connections import GuardedProtocol
from gateway.http.errors import origin_of
from gateway.http.services import services_of
from gateway.http.speaking import header_of
from gateway.prompt.approximate import HEADER
from gateway.prompt.ask import Ask, Principal, TurnId
from gateway.prompt.images import ImagesNamed
from gateway.prompt.wish import ApproximateMark
from gateway.turn.state import Accepted, Arrived, Whole
from gateway.turn.turn import TurnEvents

KeyRequest = Request[Principal, None, Any]
Result = TypeVar("Result")
AskT = TypeVar("AskT")
EventT = TypeVar("EventT")
WholeT = TypeVar("WholeT")
WriterT = TypeVar("WriterT", bound=Writer[Any, Any])

_KEEP_HEADER = HEADER.encode()
_STREAM_HEADERS = [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
_encode = msgspec.json.Encoder().encode


class NamesModel(Protocol):
    """A request of any dialect."""

    @property
    def model(self) -> str: ...


RequestT = TypeVar("RequestT", bound=NamesModel)


async def while_present(scope: Scope, work: Coroutine[Any, Any, Result]) -> Result:
    """Run `work`; raise ClientGone if the client leaves. The body must have been read."""
    connection: GuardedProtocol = scope["state"]["connection"]
    try:
        # The timeout has no deadline yet. When the client leaves, it is set to now.
        async with asyncio.timeout(None) as presence:
            connection.watch(partial(presence.reschedule, 0))
            return await work
    except TimeoutError:
        if presence.expired():
            raise ClientGone from None
        raise
    finally:
        connection.watch(None)


def header_mark_of(
    request: Request[Any, Any, Any], *, is_taken: bool = True
) -> ApproximateMark | None:
    """The mark that the header asks for: `keep=0.5`, `keep=0.5; scorer=keydiff` or `sibling=true`.

    None without the header. Raise InvalidRequest for any other value, and for any value unless
    `is_taken`.
    """
    scope = request.scope
    if header_of(scope, _KEEP_HEADER) is None:
        return None
    if not is_taken:
        raise InvalidRequest(f"{HEADER}: not taken here; a block asks by `cache_control.holdfast`")
    # `request.headers` would decode all of them.
    values = [value.decode("latin-1") for name, value in scope["headers"] if name == _KEEP_HEADER]
    fields = [field.partition("=") for field in "; ".join(values).split(";")]
    by_name = {name.strip(): value.strip() for name, _, value in fields}
    try:
        if len(by_name) < len(fields):
            raise InvalidRequest(f"{HEADER}: a field is there twice")
        approximate = msgspec.convert(by_name, Approximate, strict=False)
    except msgspec.ValidationError as error:
        raise InvalidRequest(f"{HEADER}: {error}; write `keep=0.5; scorer=kvzip`") from None
    approximate.check(HEADER)
    wish = approximate.wish("5m")
    if not isinstance(wish, ApproximateMark):
        raise InvalidRequest(f"{HEADER}: a `block` has a marker of its own")
    return wish


async def prepared(
    request: KeyRequest,
    body: bytes,
    decode: Callable[[bytes, RequestBounds], RequestT],
    make: Callable[[RequestT, RequestContext], AskT],
    fetch: Callable[[RequestT], Coroutine[Any, Any, tuple[RequestT, int]]] | None = None,
) -> AskT:
    """Decode and lower a body, in a thread if it is large, and stop if the client leaves.

    `fetch` adds the stored content that the request names, and returns its bytes. Images are
    fetched by their addresses if the first lowering reports some.
    """
    services = services_of(request)
    num_bytes = len(body)
    workers = services.workers
    user = request.user
    arrived = request.scope["state"]["arrived"]
    header_mark = header_mark_of(request)

    def context_for(decoded: RequestT) -> RequestContext:
        return services.context_of(user, services.find_model(decoded.model), arrived, header_mark)

    if num_bytes <= INLINE_BYTES and fetch is None:
        decoded = decode(body, services.bounds)
        with suppress(ImagesNamed):
            return make(decoded, context_for(decoded))

    async def work() -> AskT:
        decoded = await workers.run(user.workspace, num_bytes, decode, body, services.bounds)
        size = num_bytes
        if fetch is not None:
            decoded, fetched_bytes = await fetch(decoded)
            size += fetched_bytes
        context = context_for(decoded)
        try:
            return await workers.run(user.workspace, size, make, decoded, context)
        except ImagesNamed as error:
            places = error.places
        take = partial(brought_in, request.scope)
        files = await services.image_hosts.fetch(user.workspace, places, take)
        size += sum(map(len, files.values()))
        context = replace(context, fetched=files)
        return await workers.run(user.workspace, size, make, decoded, context)

    return await while_present(request.scope, work())


async def begun(
    request: KeyRequest, ask: Ask, make_writer: Callable[[TurnId, Findings], WriterT]
) -> tuple[TurnEvents, WriterT]:
    """Run the turn until an engine has it, and make its answer's writer."""
    turns = services_of(request).turns
    events = turns.run(ask, turns.new_id(), origin_of(request))
    accepted = await anext(events)
    assert isinstance(accepted, Accepted)
    approximate = ask.plan.approximate
    if approximate is not None:  # routing has refused engines that can't do it
        request.scope["state"]["approximate"] = approximate.header
    return events, make_writer(accepted.turn_id, accepted.findings)


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream(Generic[EventT]):
    """How a dialect streams. Frames that came together go out together."""

    # Makes the bytes of events. If it makes none, `idle` is sent.
    render: Callable[[list[EventT]], bytes]
    # Makes the end of a stream after an error.
    failed: Callable[[GatewayError], bytes]
    # The first bytes of the stream.
    first: bytes = b""
    # The last bytes of the stream. After an error they are sent only if `is_closed`.
    last: bytes = b""
    # Keeps the connection alive.
    idle: bytes = sse.COMMENT
    # Whether a stream with an error has its last bytes too.
    is_closed: bool = False
    # Awaited with the last events, before they go out.
    settle: Callable[[list[EventT]], Awaitable[None]] | None = None
    content_type: bytes = b"text/event-stream; charset=utf-8"


async def answer(
    request: KeyRequest,
    ask: Ask,
    make_writer: Callable[[TurnId, Findings], Writer[EventT, Any]],
    stream: Stream[EventT] | None,
) -> ASGIResponse:
    """Run the turn and answer, with `stream` as a stream once an engine has the turn, else in one
    piece."""

    async def run() -> ASGIResponse:
        events, writer = await begun(request, ask, make_writer)
        if stream is not None:
            return Streamed(stream, events, writer)
        return answered(await gathered(events, writer))

    return await while_present(request.scope, run())


async def answer_settled(
    request: KeyRequest,
    ask: Ask,
    make_writer: Callable[[TurnId, Findings], WriterT],
    stream_of: Callable[[WriterT], Stream[Any]],
    body_of: Callable[[WriterT], msgspec.Struct],
) -> ASGIResponse:
    """Run the turn and answer as the request wants it. A stream is settled before its last events
    go out, and an answer in one piece before `body_of` reads it."""
    events, writer = await while_present(request.scope, begun(request, ask, make_writer))
    stream = stream_of(writer)
    if ask.stream:
        return Streamed(stream, events, writer)
    await while_present(request.scope, gathered(events, writer))
    if stream.settle is not None:
        await stream.settle([])
    return answered(body_of(writer))


async def gathered(events: TurnEvents, writer: Writer[Any, WholeT]) -> WholeT:
    """The whole answer of a turn that is not streamed."""
    async for event in events:
        if isinstance(event, Whole):
            writer.take_all(event.frames)
    return writer.whole()


def answered(body: msgspec.Struct) -> ASGIResponse:
    """The whole answer, as JSON."""
    return ASGIResponse(body=_encode(body), media_type="application/json")


class Streamed(ASGIResponse):
    """A body that is sent as it is made. The turn is closed however the stream ends, even if the
    client stopped reading. Litestar's own stream leaves that to the garbage collector."""

    def __init__(
        self, stream: Stream[EventT], turn_events: TurnEvents, writer: Writer[EventT, Any]
    ) -> None:
        self._stream: Stream[Any] = stream
        self._turn_events = turn_events
        self._writer = writer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = self._stream
        writer = self._writer
        headers = [(b"content-type", stream.content_type), *_STREAM_HEADERS]

        async def put(piece: bytes, *, more_body: bool = True) -> None:
            await send({"type": "http.response.body", "body": piece, "more_body": more_body})

        async def put_all() -> None:
            last = stream.last
            if stream.first:
                await put(stream.first)
            try:
                async for turn_event in self._turn_events:
                    if not isinstance(turn_event, Arrived):
                        await put(stream.idle)
                        continue
                    events = writer.write_all(turn_event.frames)
                    if writer.is_done and stream.settle is not None:
                        await stream.settle(events)
                    await put(stream.render(events) or stream.idle)
            except GatewayError as error:
                await put(stream.failed(error))
                last = last if stream.is_closed else b""
            await put(last, more_body=False)

        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await while_present(scope, put_all())
        except ClientGone:
            pass
        finally:
            await self._turn_events.aclose()
