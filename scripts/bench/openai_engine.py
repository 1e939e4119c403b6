"""The synthetic engine with plain OpenAI chat completions beside its own protocol.

    python -m scripts.bench.openai_engine        settings: the engine's ENGINE_* variables

Other routers are measured with it on the same engine and pool as ours (`scripts/bench/routing.py`).
`cache_control` is ignored here, nothing is leased, and reuse is automatic alone. A text has the
same tokens here as by the engine's protocol, and the engine counts both alike.
"""

import os
import signal
import time
from collections.abc import AsyncIterator
from typing import Any, Literal
from uuid import uuid4

import msgspec
from litestar import Response, Router, get, post
from litestar.di import NamedDependency
from litestar.params import RawBody
from litestar.response import Stream

from engine import protocol
from engine.__main__ import backend_factory
from engine.backends.base import decoder_of
from engine.backends.looped import EngineBackend
from engine.backends.synthetic_renderer import SyntheticRenderer
from engine.errors import EngineError
from engine.serve.connections import Server
from engine.serve.health import ServedEngine
from engine.serve.server import create_app, guard
from engine.settings import Settings

OPENAI_SCOPE = "openai"


class ContentPart(msgspec.Struct):
    text: str
    type: Literal["text"] = "text"


class ChatMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str | list[ContentPart]

    def parts(self) -> list[protocol.Part]:
        if isinstance(self.content, str):
            return [protocol.TextPart(self.content)]
        return [protocol.TextPart(part.text) for part in self.content]


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool = False


class ChatRequest(msgspec.Struct):
    """Fields that are not here are ignored, as a stand-in engine may."""

    messages: list[ChatMessage]
    model: str = "synthetic"
    max_tokens: int = 16
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()


decode_chat = decoder_of(ChatRequest)


@get("/models")
async def models() -> dict[str, Any]:
    return {"object": "list", "data": [{"id": "synthetic", "object": "model", "created": 0}]}


@get("/health")
async def health(host: NamedDependency[ServedEngine]) -> Response[None]:
    """As vLLM and SGLang have it: a status and no body."""
    return Response(None, status_code=200 if host.readiness.ready else 503)


@post("/chat/completions/render", status_code=200, sync_to_thread=True)
def render_chat(body: RawBody) -> dict[str, Any]:
    """vLLM's: the token ids of a prompt. Its router asks for them to match prefixes by."""
    prompt = _prompt(decode_chat(body))
    rendered = SyntheticRenderer().render(prompt, thinking=False, scope=OPENAI_SCOPE)
    return {"token_ids": rendered.token_ids}


@post("/chat/completions", status_code=200)
async def chat_completions(
    body: RawBody, backend: NamedDependency[EngineBackend]
) -> Stream | Response[dict[str, Any]]:
    request = decode_chat(body)
    chunks = _chunks(request, backend)
    # The first chunk is awaited here, so that a refusal is still an HTTP status.
    first = await anext(chunks)
    if request.stream:
        return Stream(_server_sent(first, chunks), media_type="text/event-stream")
    text, usage = "", first.get("usage")
    async for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            text += choice["delta"].get("content", "")
    message = {"role": "assistant", "content": text}
    choices = [{"index": 0, "message": message, "finish_reason": "length"}]
    return Response(first | {"object": "chat.completion", "choices": choices, "usage": usage})


async def _server_sent(
    first: dict[str, Any], chunks: AsyncIterator[dict[str, Any]]
) -> AsyncIterator[bytes]:
    yield b"data: " + msgspec.json.encode(first) + b"\n\n"
    async for chunk in chunks:
        yield b"data: " + msgspec.json.encode(chunk) + b"\n\n"
    yield b"data: [DONE]\n\n"


async def _chunks(request: ChatRequest, backend: EngineBackend) -> AsyncIterator[dict[str, Any]]:
    generation = await backend.open(_turn(request))
    base: dict[str, Any] = {"id": f"chatcmpl-{uuid4().hex}", "object": "chat.completion.chunk"}
    base |= {"created": int(time.time()), "model": "synthetic"}
    usage, output_tokens = protocol.InputUsage(input_tokens=0), 0
    try:
        async for frame in generation:
            match frame:
                case protocol.Started():
                    usage = frame.usage
                    yield base | {"choices": [_choice({"role": "assistant", "content": ""})]}
                case protocol.TextDelta(text):
                    yield base | {"choices": [_choice({"content": text})]}
                case protocol.Finished():
                    output_tokens = frame.output_tokens
                    yield base | {"choices": [_choice({}) | {"finish_reason": "length"}]}
                case protocol.Failed():
                    raise EngineError(frame.message)
    finally:
        generation.close()
    if request.stream_options.include_usage or not request.stream:
        yield base | {"choices": [], "usage": _usage(usage, output_tokens)}


def _turn(request: ChatRequest) -> protocol.GenerateRequest:
    return protocol.GenerateRequest(
        request_id=f"openai-{uuid4().hex}",
        scope=OPENAI_SCOPE,
        prompt=_prompt(request),
        sampling=protocol.Sampling(max_tokens=request.max_tokens),
    )


def _prompt(request: ChatRequest) -> protocol.Prompt:
    messages = [protocol.Message(message.role, message.parts()) for message in request.messages]
    return protocol.Prompt(messages)


def _choice(delta: dict[str, str]) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "finish_reason": None}


def _usage(usage: protocol.InputUsage, output_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": output_tokens,
        "total_tokens": usage.prompt_tokens + output_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.prompt_tokens - usage.computed_tokens},
    }


def main() -> None:
    """Serve until a signal ends the process."""
    settings = Settings.model_validate({"backend": "synthetic"})
    secret = settings.secret.get_secret_value()
    host = ServedEngine(lambda: os.kill(os.getpid(), signal.SIGTERM))
    app = create_app(backend_factory(settings), secret, host)
    calls = [models, chat_completions, render_chat]
    app.register(Router(path="/v1", guards=[guard(secret)], route_handlers=calls))
    app.register(health)
    Server(app, host, settings).run()


if __name__ == "__main__":
    main()
