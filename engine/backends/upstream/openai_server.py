"""Any server with OpenAI's chat completions: it renders, it parses, and its usage is what it tells.

It knows no scopes. Its usage comes at the end, so where it tells what it reused a prompt is
computed by a request for one token first, as on vLLM.
"""

from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from engine.backends.upstream.chat import chat_messages, chat_tools
from engine.backends.upstream.checks import check_context, check_prompt_tokens
from engine.backends.upstream.deltas import ChatDelta, ChatPiece
from engine.backends.upstream.model import ModelFacts
from engine.backends.upstream.openai_wire import MODELS, Usage, find_model
from engine.backends.upstream.server import (
    Facts,
    Kind,
    Order,
    Piece,
    ProbeTexts,
    UpstreamError,
    UpstreamGone,
)
from engine.backends.upstream.wire import Wire, decoded

CHAT = "/v1/chat/completions"
MAX_RUNNING = 64


class _Choice(msgspec.Struct):
    delta: ChatDelta = ChatDelta()
    finish_reason: str | None = None


class _Chat(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


class OpenAiServer:
    def __init__(self, wire: Wire, model: str, files: ModelFacts, kind: Kind = "openai") -> None:
        """`model`: the server's name of it, or empty for its only one. `kind` is what is told."""
        self._kind: Kind = kind
        self._wire = wire
        self._model = model
        self._files = files

    async def find_facts(self, probe: ProbeTexts) -> Facts:
        model = await find_model(self._wire, self._model)
        self._model = model.id
        return Facts(
            kind=self._kind,
            model=self._model,
            version="",
            max_context_tokens=check_context(model.max_model_len, self._files),
            max_running=MAX_RUNNING,
            tells="at_the_end",
            tells_note="not asked yet",
            isolation="none",
            isolation_note="the server knows no scopes",
            capabilities=frozenset({"multiple_choices"}),
            takes_grammars=False,
            is_chat=True,
            forced_note="its formats are not ours",
        )

    async def fingerprint(self) -> str:
        await self._wire.check_alive(MODELS)
        return ""

    async def prefill(self, order: Order) -> Piece:
        body = self._body(order) | {"max_tokens": 1, "stream": False}
        del body["stream_options"]
        answer = await self._wire.post_checked(CHAT, body, _Chat, is_long=True)
        if answer.usage is None:
            return Piece()
        cached = _cached(answer.usage, len(order.token_ids))
        return Piece(cached_tokens=cached, prompt_tokens=answer.usage.prompt_tokens)

    async def generate(self, order: Order) -> AsyncGenerator[Piece, None]:
        is_ended, num_bytes = False, 0
        async for data in self._wire.events(CHAT, self._body(order)):
            if data == b"[DONE]":
                break
            answer = decoded(data, _Chat, CHAT)
            if answer.error is not None:
                raise UpstreamError("the server ended the stream with an error")
            if len(answer.choices) > 1:
                raise UpstreamError("more choices than were asked for")
            for choice in answer.choices:
                num_bytes += len(data)
                if num_bytes > (order.max_tokens + 16) * MAX_TOKEN_EVENT_BYTES:
                    raise UpstreamError("more text than was asked for")
                is_ended = is_ended or choice.finish_reason is not None
                yield Piece(chat=ChatPiece(choice.delta, choice.finish_reason))
            if answer.usage is not None and answer.usage.completion_tokens is not None:
                sampled = answer.usage.completion_tokens
                if not 0 <= sampled <= order.max_tokens:
                    raise UpstreamError(f"the server counted {sampled} tokens of its answer")
                yield Piece(sampled_tokens=sampled)
        if not is_ended:
            raise UpstreamGone("the stream ended without a reason")
        yield Piece(is_last=True)

    async def close(self) -> None:
        await self._wire.close()

    def _body(self, order: Order) -> dict[str, Any]:
        sample = order.sample
        body: dict[str, Any] = {
            "model": self._model,
            "messages": chat_messages(order.request.prompt),
            "max_tokens": order.max_tokens,
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
            **chat_tools(order.request),
        }
        if order.is_seeded:
            body["seed"] = sample.seed % 2**31
        return body


MAX_TOKEN_EVENT_BYTES = 4096
"""An event of one token has a few hundred bytes; servers that send several at a time have more."""


def _cached(usage: Usage, sent: int) -> int | None:
    """What the server reused, of our tokens: 0 where it counts the prompt otherwise than we do."""
    cached = usage.cached_tokens
    if cached is None:
        return None
    if usage.prompt_tokens != sent:
        return 0
    check_prompt_tokens(sent, cached, sent)
    return cached
