"""The synthetic engine with plain OpenAI chat completions beside its own protocol.

    python -m scripts.bench.openai_engine        settings: the engine's ENGINE_* variables

Other routers are measured with it on the same engine and pool as ours (`routing.py`). Answers are
streamed. `cache_control` is ignored here, nothing is leased, and reuse is automatic alone. A text
has the same tokens here as by the engine's protocol, and the engine counts both alike.
"""

import os
import signal
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
from engine.backends.base import Backend, Generation, decoder_of
from engine.backends.synthetic_renderer import SyntheticRenderer
from engine.errors import EngineError
from engine.serve.connections import Server
from engine.serve.health import ServedEngine
from engine.serve.server import create_app, guard
from engine.settings import Settings

SCOPE = "openai"


class ContentPart(msgspec.Struct):
    text: str


class ChatMessage(msgspec.Struct):
    role: Literal["system", "user", "assistant"]
    content: str | list[ContentPart]


class ChatRequest(msgspec.Struct):
    """Fields that are not here are ignored, as a stand-in engine may."""

    messages: list[ChatMessage]
    max_tokens: int = 16

    def prompt(self) -> protocol.Prompt:
        messages = []
        for message in self.messages:
            said = message.content
            texts = [said] if isinstance(said, str) else [part.text for part in said]
            parts: list[protocol.Part] = [protocol.TextPart(text) for text in texts]
            messages.append(protocol.Message(message.role, parts))
        return protocol.Prompt(messages)


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
    prompt = decode_chat(body).prompt()
    rendered = SyntheticRenderer().render(prompt, thinking=False, scope=SCOPE)
    return {"token_ids": rendered.token_ids}


@post("/chat/completions", status_code=200)
async def chat_completions(body: RawBody, backend: NamedDependency[Backend]) -> Stream:
    request = decode_chat(body)
    # Opened here, so that a refusal is still an HTTP status.
    generation = await backend.open(
        protocol.GenerateRequest(
            request_id=f"openai-{uuid4().hex}",
            scope=SCOPE,
            prompt=request.prompt(),
            sampling=protocol.Sampling(max_tokens=request.max_tokens),
        )
    )
    return Stream(_server_sent(generation), media_type="text/event-stream")


async def _server_sent(generation: Generation) -> AsyncIterator[bytes]:
    fixed = {"id": f"chatcmpl-{uuid4().hex}", "object": "chat.completion.chunk", "created": 0}

    def chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        answer = {**fixed, "model": "synthetic", "choices": [choice]}
        return b"data: " + msgspec.json.encode(answer) + b"\n\n"

    try:
        async for frame in generation:
            match frame:
                case protocol.Started():
                    yield chunk({"role": "assistant", "content": ""})
                case protocol.TextDelta(text):
                    yield chunk({"content": text})
                case protocol.Finished():
                    yield chunk({}, "length")
                case protocol.Failed():
                    raise EngineError(frame.message)
        yield b"data: [DONE]\n\n"
    finally:
        generation.close()


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
