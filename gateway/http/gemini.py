"""POST /v1beta/models/{model}:generateContent, :streamGenerateContent and :countTokens.

The same calls are served under /v1/models. A stream is a list of JSON objects, or server-sent
events where the query says `alt=sse`.
"""

from collections.abc import AsyncGenerator, Callable
from typing import NamedTuple

import msgspec
from litestar.response.base import ASGIResponse
from msgspec import UNSET

from gateway.base.catalogue import Model
from gateway.base.errors import GatewayError, NotFound
from gateway.dialects import sse
from gateway.dialects.errors import body_of
from gateway.dialects.gemini.lower import Asked, Held, ask_of
from gateway.dialects.gemini.request import GenerateRequest, decode_count, decode_generate
from gateway.dialects.gemini.response import (
    GeminiWriter,
    GenerateContentResponse,
    ModalityCount,
    TokenCount,
)
from gateway.http.cached_contents import held_by
from gateway.http.errors import request_id
from gateway.http.generation import (
    Items,
    KeyRequest,
    Streamed,
    answered,
    begun,
    check_media,
    gathered,
    written,
)
from gateway.http.presence import while_present
from gateway.http.services import Services, services_of
from gateway.prompt.ask import Ask

_GENERATE, _STREAM, _COUNT = "generateContent", "streamGenerateContent", "countTokens"
_encode = msgspec.json.Encoder().encode


async def call_model(request: KeyRequest, body: bytes, model_id: str) -> ASGIResponse:
    """Answer a call of a model's method. `model_id` ends in `:` and the method.

    Raise NotFound for an unknown method.
    """
    model, _, method = model_id.lstrip("/").rpartition(":")
    if method not in (_GENERATE, _STREAM, _COUNT):
        raise NotFound(f"method: no method `{method[:64]}` of a model")
    check_media(request)
    services = services_of(request)
    if method == _COUNT:
        return await _count(request, services, body, model)
    made = await _asked(request, services, body, model, method)
    items, writer = await _begin(request, services, made)
    if method == _GENERATE:
        return answered(await while_present(request, gathered(items, writer)))
    failed = request_id(request.scope)
    if request.query_params.get("alt") == "sse":
        return Streamed(_events(items, writer, failed), items)
    return Streamed(_array(items, writer, failed), items, b"application/json")


class Made(NamedTuple):
    """An Ask, and whether its text goes out as the word of an enum."""

    ask: Ask
    is_enum: bool


async def _asked(
    request: KeyRequest, services: Services, body: bytes, model: str, method: str
) -> Made:
    arrived = request.scope["state"]["arrived"]

    def read() -> GenerateRequest:
        if method == _COUNT:
            return decode_count(body, model, services.bounds)
        is_streamed = method == _STREAM
        return decode_generate(body, model, services.bounds, is_streamed=is_streamed)

    def make(decoded: GenerateRequest, found: Model, held: Held | None) -> Made:
        asked = Asked(request.user, found, arrived, services.unreadable)
        ask = ask_of(decoded, asked, stream=method == _STREAM, held=held)
        return Made(ask, decoded.generation_config.is_enum)

    return await while_present(request, _prepared(request, services, len(body), read, make))


async def _prepared(
    request: KeyRequest,
    services: Services,
    num_bytes: int,
    read: Callable[[], GenerateRequest],
    make: Callable[[GenerateRequest, Model, Held | None], Made],
) -> Made:
    """Read the body, then what its cached content holds, then make the Ask of both."""
    workers, workspace = services.workers, request.user.workspace
    decoded = await workers.run(workspace, num_bytes, read)
    model = services.find_model(decoded.model)
    found = await held_by(request, decoded, model)
    held, held_bytes = found or (None, 0)
    return await workers.run(workspace, num_bytes + held_bytes, make, decoded, model, held)


async def _count(request: KeyRequest, services: Services, body: bytes, model: str) -> ASGIResponse:
    with services.counting.admitted(request.user.workspace, len(body)):
        made = await _asked(request, services, body, model, _COUNT)
        tokens = await while_present(request, services.turns.count(made.ask))
    return answered(
        TokenCount(total_tokens=tokens, prompt_tokens_details=[ModalityCount(token_count=tokens)])
    )


async def _begin(request: KeyRequest, services: Services, made: Made) -> tuple[Items, GeminiWriter]:
    """Run the turn until an engine has it. The response's id is the turn's."""
    ask = made.ask
    turn_id, items, findings = await begun(request, services, ask)
    writer = GeminiWriter(
        id=turn_id,
        model=ask.model.id,
        found=findings,
        paths=[slot.path for slot in ask.plan.slots],
        num_choices=ask.sampling.num_choices,
        hides_thinking=ask.omit_thinking,
        is_enum=made.is_enum,
    )
    return items, writer


async def _events(
    items: Items, writer: GeminiWriter, request_id: str
) -> AsyncGenerator[bytes, None]:
    """After an error the stream ends, because nothing was completed.

    The next event is always begun, and a heartbeat is a space in it. Some clients (Genkit,
    `@google/generative-ai`) take all that stands between two events for a broken one, also a blank
    line.
    """
    yield sse.OPEN
    try:
        async for chunks in written(items, writer):
            pieces: list[bytes] = []
            for chunk in chunks:
                pieces += (_encode(chunk), sse.END if _is_last(chunk) else sse.NEXT)
            yield b"".join(pieces) or sse.SPACE
    except GatewayError as error:
        yield _encode(body_of(error, request_id, "gemini")) + sse.END


def _is_last(chunk: GenerateContentResponse) -> bool:
    return chunk.usage_metadata is not UNSET


async def _array(
    items: Items, writer: GeminiWriter, request_id: str
) -> AsyncGenerator[bytes, None]:
    """One JSON list over the whole stream. Blanks keep the connection alive."""
    separator = b"["
    try:
        async for chunks in written(items, writer):
            pieces = []
            for chunk in chunks:
                pieces += [separator, _encode(chunk)]
                separator = b",\r\n"
            yield b"".join(pieces) or b"\n"
    except GatewayError as error:
        yield separator + _encode(body_of(error, request_id, "gemini"))
    yield b"]"
