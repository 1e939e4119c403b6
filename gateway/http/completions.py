"""POST /v1/chat/completions and POST /v1/completions."""

from collections.abc import AsyncGenerator
from typing import TypeVar

import msgspec
from litestar import Controller, post
from litestar.params import RawBody
from litestar.response.base import ASGIResponse

from gateway.base.catalogue import Model
from gateway.base.errors import GatewayError
from gateway.dialects import sse
from gateway.dialects.errors import body_of
from gateway.dialects.openai.lower import chat_ask_of, completion_ask_of
from gateway.dialects.openai.request import (
    ChatRequest,
    CompletionRequest,
    decode_chat,
    decode_completion,
)
from gateway.dialects.openai.response import ChatWriter, TextWriter
from gateway.http.auth import KeyAuth
from gateway.http.errors import request_id
from gateway.http.generation import (
    Items,
    KeyRequest,
    Streamed,
    answered,
    begun,
    check_media,
    gathered,
    prepared,
    written,
)
from gateway.http.presence import while_present
from gateway.http.services import Services, services_of
from gateway.prompt.ask import Ask

WriterT = TypeVar("WriterT", ChatWriter, TextWriter)


class ChatCompletionsController(Controller):
    path = "/v1/chat/completions"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        services, arrived = services_of(request), request.scope["state"]["arrived"]

        def read() -> tuple[ChatRequest, int]:
            return services.without_nonces(decode_chat(body, services.bounds))

        def make(decoded: ChatRequest, num_removed: int, model: Model) -> Ask:
            ask = chat_ask_of(decoded, request.user, model, arrived, services.unreadable)
            return msgspec.structs.replace(ask, num_removed=num_removed)

        check_media(request)
        ask = await prepared(request, services, len(body), read, make)
        return await _answer(request, services, ask, ChatWriter, "chatcmpl")


class CompletionsController(Controller):
    path = "/v1/completions"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        services, arrived = services_of(request), request.scope["state"]["arrived"]

        def read() -> tuple[CompletionRequest, int]:
            return decode_completion(body, services.bounds), 0

        def make(decoded: CompletionRequest, _: int, model: Model) -> Ask:
            return completion_ask_of(decoded, request.user, model, arrived)

        check_media(request)
        ask = await prepared(request, services, len(body), read, make)
        return await _answer(request, services, ask, TextWriter, "cmpl")


async def _answer(
    request: KeyRequest, services: Services, ask: Ask, kind: type[WriterT], prefix: str
) -> ASGIResponse:
    """Run the turn. The response's id is the turn's, in OpenAI's form."""
    turn_id, items, findings = await begun(request, services, ask)
    writer = kind(
        id=f"{prefix}-{turn_id.removeprefix('msg_')}",
        model=ask.model.id,
        created=int(services.clock.wall().timestamp()),
        found=findings,
        paths=[slot.path for slot in ask.plan.slots],
        num_choices=ask.sampling.num_choices,
        include_usage=not ask.stream or ask.include_usage,
    )
    if ask.stream:
        return Streamed(_stream(items, writer, request_id(request.scope)), items)
    return answered(await while_present(request, gathered(items, writer)))


async def _stream(items: Items, writer: WriterT, request_id: str) -> AsyncGenerator[bytes, None]:
    """Yield the stream's events; frames that came together go out together.

    After an error the stream ends without its last line, because nothing was completed.
    """
    try:
        async for chunks in written(items, writer):
            yield b"".join(map(sse.data, chunks)) or sse.COMMENT
        yield sse.DONE
    except GatewayError as error:
        yield sse.data(body_of(error, request_id, "openai"))
