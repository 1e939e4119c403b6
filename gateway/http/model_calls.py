"""The calls that run turns: Messages, Chat Completions, Completions and Gemini's.

Each reads its body, lowers it to an Ask, runs the turn and writes the answer in its dialect.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Controller, post
from litestar.params import HeaderParameter, RawBody
from litestar.response.base import ASGIResponse
from msgspec import UNSET

from engine.protocol import Frame
from gateway.base.bounds import RequestBounds
from gateway.base.errors import GatewayError, InvalidRequest, NotFound
from gateway.dialects import sse
from gateway.dialects.anthropic import lower as anthropic
from gateway.dialects.anthropic import request as messages
from gateway.dialects.anthropic import response as answers
from gateway.dialects.anthropic.decode import decode_count_tokens, decode_messages
from gateway.dialects.collector import Event, Findings
from gateway.dialects.errors import anthropic_error, body_of
from gateway.dialects.gemini import lower as gemini
from gateway.dialects.gemini import response as gemini_answers
from gateway.dialects.gemini.request import GenerateRequest, decode_count, decode_generate
from gateway.dialects.lowering import RequestContext
from gateway.dialects.openai import request as chat
from gateway.dialects.openai.lower import chat_ask_of, completion_ask_of
from gateway.dialects.openai.response import ChatWriter, TextWriter
from gateway.http.auth import KeyAuth
from gateway.http.cached_contents import held_by
from gateway.http.errors import request_id
from gateway.http.generation import KeyRequest, Stream, answer, answered, prepared, while_present
from gateway.http.services import services_of
from gateway.http.speaking import header_of
from gateway.prompt.ask import Ask, Compared, TurnId

VersionHeader = Annotated[str | None, HeaderParameter(name="anthropic-version")]
_encode = msgspec.json.Encoder().encode


# Messages.


class MessagesController(Controller):
    """POST /v1/messages and POST /v1/messages/count_tokens."""

    path = "/v1/messages"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        check_attribution(request)
        services = services_of(request)
        scope = request.scope
        version = check_version(header_of(scope, b"anthropic-version"))
        betas = header_of(scope, b"anthropic-beta") or ""

        def make(decoded: messages.MessagesRequest, context: RequestContext) -> Ask:
            diagnostics = decoded.diagnostics
            compared = Compared(
                is_wanted=diagnostics is not None,
                previous=diagnostics.previous_message_id if diagnostics else None,
                parameters=anthropic.prompt_parameters(decoded, betas),
            )
            return anthropic.ask_of(
                decoded,
                context,
                version,
                comparison=compared,
                betas=betas,
                marks_for_client=services.auto_cache_messages,
            )

        ask = await prepared(request, body, decode_messages, make)
        stream = _message_stream(request) if ask.stream else None
        return await answer(request, ask, partial(_message_writer, ask), stream)

    @post("/count_tokens", status_code=200)
    async def count_tokens(
        self, request: KeyRequest, body: RawBody, anthropic_version: VersionHeader = None
    ) -> answers.TokenCount:
        check_attribution(request)
        services = services_of(request)
        version = check_version(anthropic_version)

        def make(decoded: messages.CountTokensRequest, context: RequestContext) -> Ask:
            return anthropic.count_ask_of(decoded, context, version)

        with services.counting.admitted(request.user.workspace, len(body)):
            ask = await prepared(request, body, decode_count_tokens, make)
            return answers.TokenCount(await while_present(request.scope, services.turns.count(ask)))


def check_attribution(request: KeyRequest) -> None:
    """Check two parameters that the SDK sends as headers."""
    if header_of(request.scope, b"anthropic-user-profile-id"):
        raise InvalidRequest("anthropic-user-profile-id: user profiles are not supported")
    workspace = header_of(request.scope, b"anthropic-workspace-id")
    if workspace not in (None, "", request.user.workspace):
        raise InvalidRequest("anthropic-workspace-id: does not match the workspace of the API key")


def check_version(version: str | None) -> messages.Version:
    if not version:
        raise InvalidRequest("anthropic-version: header is required")
    for valid in messages.VERSIONS:
        if version == valid:
            return valid
    raise InvalidRequest(f'anthropic-version: "{version[:32]}" is not a valid version')


def whole_message(
    ask: Ask, turn_id: TurnId, findings: Findings, frames: Sequence[Frame]
) -> answers.Message:
    """The whole message of a turn that is not streamed, from all of its frames."""
    writer = _message_writer(ask, turn_id, findings)
    writer.take_all(frames)
    return writer.whole()


def _message_writer(ask: Ask, turn_id: TurnId, findings: Findings) -> answers.MessageWriter:
    return answers.MessageWriter(
        id=turn_id,
        model=ask.model.id,
        paths=ask.plan.paths,
        findings=findings,
        omits_thinking=ask.omit_thinking,
        hides_thinking=not ask.thinking,
    )


def _message_stream(request: KeyRequest) -> Stream[Event]:
    failed_id = request_id(request.scope)
    has_pinged = False

    def render(events: list[Event]) -> bytes:
        nonlocal has_pinged
        pieces: list[bytes] = []
        for event in events:
            pieces.append(sse.event(event["type"], event))
            if event["type"] == "content_block_start" and not has_pinged:
                has_pinged = True
                pieces.append(sse.PING)
        return b"".join(pieces)

    def failed(error: GatewayError) -> bytes:
        return sse.event("error", anthropic_error(error, failed_id))

    return Stream(render=render, failed=failed)


# Chat Completions and Completions.


class ChatCompletionsController(Controller):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        ask = await prepared(request, body, chat.decode_chat, chat_ask_of)
        kind = partial(ChatWriter, custom_tools=ask.custom_tools)
        return await _complete(request, ask, kind, "chatcmpl")


class CompletionsController(Controller):
    """POST /v1/completions."""

    path = "/v1/completions"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        ask = await prepared(request, body, chat.decode_completion, completion_ask_of)
        return await _complete(request, ask, TextWriter, "cmpl")


async def _complete(
    request: KeyRequest, ask: Ask, kind: Callable[..., ChatWriter | TextWriter], prefix: str
) -> ASGIResponse:
    """Run the turn. The response's id is the turn's, in OpenAI's form."""

    def make(turn_id: TurnId, findings: Findings) -> Any:
        return kind(
            id=f"{prefix}-{turn_id.removeprefix('msg_')}",
            model=ask.model.id,
            created=int(services_of(request).clock.wall().timestamp()),
            findings=findings,
            paths=ask.plan.paths,
            num_choices=ask.sampling.num_choices,
            include_usage=not ask.stream or ask.include_usage,
        )

    stream: Stream[Any] = Stream(
        render=lambda chunks: b"".join(map(sse.data, chunks)),
        failed=lambda error: sse.data(body_of(error, request_id(request.scope), "openai")),
        last=sse.DONE,
    )
    return await answer(request, ask, make, stream if ask.stream else None)


# Gemini.

_GENERATE = "generateContent"
_STREAM = "streamGenerateContent"
_COUNT = "countTokens"


async def call_gemini_model(request: KeyRequest, body: bytes, model_id: str) -> ASGIResponse:
    """Answer a call of a model's method. `model_id` ends in `:` and the method. A stream is a list
    of JSON objects, or server-sent events where the query says `alt=sse`. Raise NotFound for an
    unknown method."""
    model, _, method = model_id.lstrip("/").rpartition(":")
    if method not in (_GENERATE, _STREAM, _COUNT):
        raise NotFound(f"method: no method `{method[:64]}` of a model")
    services = services_of(request)
    held = None

    def read(body: bytes, bounds: RequestBounds) -> GenerateRequest:
        if method == _COUNT:
            return decode_count(body, model, bounds)
        return decode_generate(body, model, bounds, is_streamed=method == _STREAM)

    async def fetch(decoded: GenerateRequest) -> tuple[GenerateRequest, int]:
        nonlocal held
        model_of_call = services.find_model(decoded.model)
        content = await held_by(request, decoded.cached_content, model_of_call)
        if content is None:
            return decoded, 0
        held, num_bytes = content
        return decoded, num_bytes

    def lower(decoded: GenerateRequest, context: RequestContext) -> tuple[Ask, bool]:
        is_streamed = method == _STREAM
        is_count = method == _COUNT
        ask = gemini.ask_of(decoded, context, stream=is_streamed, held=held, is_count=is_count)
        return ask, decoded.generation_config.is_enum

    if method == _COUNT:
        with services.counting.admitted(request.user.workspace, len(body)):
            ask, _ = await prepared(request, body, read, lower, fetch)
            tokens = await while_present(request.scope, services.turns.count(ask))
        details = [gemini_answers.ModalityCount(token_count=tokens)]
        return answered(
            gemini_answers.TokenCount(total_tokens=tokens, prompt_tokens_details=details)
        )
    ask, is_enum = await prepared(request, body, read, lower, fetch)

    def make(turn_id: TurnId, findings: Findings) -> gemini_answers.GeminiWriter:
        return gemini_answers.GeminiWriter(
            id=turn_id,
            model=ask.model.id,
            findings=findings,
            paths=ask.plan.paths,
            num_choices=ask.sampling.num_choices,
            hides_thinking=ask.omit_thinking,
            is_enum=is_enum,
        )

    stream = None
    if method == _STREAM:
        has_events = request.query_params.get("alt") == "sse"
        failed_id = request_id(request.scope)
        stream = _gemini_events(failed_id) if has_events else _gemini_list(failed_id)
    return await answer(request, ask, make, stream)


def _gemini_events(failed_id: str) -> Stream[gemini_answers.GenerateContentResponse]:
    """Server-sent events. The beginning of the next event is always sent at once, and a heartbeat
    is a space in it. Some clients (Genkit, `@google/generative-ai`) take anything between two
    events for a broken event, even a blank line."""

    def render(chunks: list[gemini_answers.GenerateContentResponse]) -> bytes:
        pieces: list[bytes] = []
        for chunk in chunks:
            is_last = chunk.usage_metadata is not UNSET
            pieces += (_encode(chunk), sse.END if is_last else sse.NEXT)
        return b"".join(pieces)

    def failed(error: GatewayError) -> bytes:
        return _encode(body_of(error, failed_id, "gemini")) + sse.END

    return Stream(render=render, failed=failed, first=sse.OPEN, idle=sse.SPACE)


def _gemini_list(failed_id: str) -> Stream[gemini_answers.GenerateContentResponse]:
    """One JSON list over the whole stream. Blanks keep the connection alive."""
    separator = b"["

    def render(chunks: list[gemini_answers.GenerateContentResponse]) -> bytes:
        nonlocal separator
        pieces = []
        for chunk in chunks:
            pieces += [separator, _encode(chunk)]
            separator = b",\r\n"
        return b"".join(pieces)

    def failed(error: GatewayError) -> bytes:
        return separator + _encode(body_of(error, failed_id, "gemini"))

    return Stream(
        render=render,
        failed=failed,
        last=b"]",
        idle=b"\n",
        is_closed=True,
        content_type=b"application/json",
    )
