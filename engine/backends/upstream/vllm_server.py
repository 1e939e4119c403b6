"""An unmodified `vllm serve`: token ids to `/v1/completions`, token ids back.

vLLM tells how many tokens of a prompt it reused with the last event of a stream only, and then only
with `--enable-prompt-tokens-details`. The first frame of an answer needs that number. So a prompt
is computed first by a request for one token; the generation that follows finds it in the cache.
"""

import re
from collections.abc import AsyncGenerator
from typing import Any

import msgspec

from engine.backends.upstream.checks import check_context, check_prompt_tokens, check_tokens
from engine.backends.upstream.model import ModelFacts
from engine.backends.upstream.openai_wire import Usage, find_model
from engine.backends.upstream.server import (
    Facts,
    Order,
    Piece,
    ProbeTexts,
    UpstreamError,
    UpstreamGone,
    UpstreamRefused,
)
from engine.backends.upstream.wire import Wire, decoded

COMPLETIONS = "/v1/completions"
MAX_RUNNING = 256
"""vLLM does not tell its `--max-num-seqs`; what it has no room for waits there."""
_MAX_SEED = 2**63
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_START = re.compile(rb"^process_start_time_seconds ([0-9.e+]+)", re.M)
_CACHE = re.compile(rb"^vllm:cache_config_info\{([^}]*)\}", re.M)


class _Tokenized(msgspec.Struct):
    tokens: list[int]


class _Choice(msgspec.Struct):
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Completion(msgspec.Struct):
    """A whole answer, or one event of a stream; an `error` comes instead of choices."""

    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


_event = msgspec.json.Decoder(_Completion)


class VllmServer:
    def __init__(self, wire: Wire, model: str, files: ModelFacts) -> None:
        """`model`: the server's name of it, or empty for its only one."""
        self._wire = wire
        self._model = model
        self._files = files
        self._vocabulary_size = files.vocabulary_size

    async def find_facts(self, probe: ProbeTexts) -> Facts:
        model = await find_model(self._wire, self._model)
        self._model = model.id
        version = await self._version()
        await self._check_tokenizer(probe)
        labels, fingerprint = await self._metrics()
        return Facts(
            kind="vllm",
            model=model.id,
            version=version,
            max_context_tokens=check_context(model.max_model_len, self._files),
            max_running=MAX_RUNNING,
            tells="at_the_end",
            tells_note="not asked yet",
            isolation="salt",
            isolation_note="not asked yet",
            block_size=_number(labels.get("block_size")),
            num_blocks=_number(labels.get("num_gpu_blocks")),
            fingerprint=fingerprint,
            capabilities=frozenset({"multiple_choices", "penalties"}),
        )

    async def fingerprint(self) -> str:
        await self._wire.check_alive("/health")
        return (await self._metrics())[1]

    async def prefill(self, order: Order) -> Piece:
        body = self._body(order) | {"max_tokens": 1, "stream": False, "seed": None}
        body |= {"stream_options": None, "structured_outputs": None}
        answer = await self._wire.post_checked(COMPLETIONS, body, _Completion, is_long=True)
        return self._told(answer, order)

    async def generate(self, order: Order) -> AsyncGenerator[Piece, None]:
        num_tokens, is_ended = 0, False
        if order.is_seeded:
            # vLLM's CPU build ends when a prompt with a seed is computed in several steps.
            await self.prefill(order)
        async for data in self._wire.events(COMPLETIONS, self._body(order)):
            if data == b"[DONE]":
                break
            answer = _decode_event(data)
            if answer.choices:
                choice = answer.choices[0]
                tokens = check_tokens(choice.token_ids or [], self._vocabulary_size)
                num_tokens += len(tokens)
                if num_tokens > order.max_tokens:
                    raise UpstreamError("more tokens than were asked for")
                is_ended = is_ended or choice.finish_reason is not None
                yield Piece(token_ids=tokens)
            if answer.usage is not None:
                yield self._told(answer, order)
        if not is_ended:
            raise UpstreamGone("the stream ended without a reason")
        yield Piece(is_last=True)

    async def close(self) -> None:
        await self._wire.close()

    # Inside.

    def _body(self, order: Order) -> dict[str, Any]:
        sample = order.sample
        top_k = sample.top_k if sample.top_k < self._vocabulary_size else 0
        bias = {str(t): b for t, b in sample.bias.items() if t < self._vocabulary_size}
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": list(order.token_ids),
            "add_special_tokens": False,
            "max_tokens": order.max_tokens,
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "top_k": top_k,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": sample.presence_penalty,
            "frequency_penalty": sample.frequency_penalty,
            "logit_bias": bias or None,
            "seed": sample.seed % _MAX_SEED if order.is_seeded else None,
            # Whatever the model's files say ends a turn: we say it.
            "ignore_eos": True,
            "stop_token_ids": list(order.end_token_ids),
            "return_token_ids": True,
            "cache_salt": order.scope,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if order.grammar is not None:
            body["structured_outputs"] = {"grammar": order.grammar}
        return body

    def _told(self, answer: _Completion, order: Order) -> Piece:
        if answer.usage is None:
            raise UpstreamError("an answer without usage")
        prompt, cached = answer.usage.prompt_tokens, answer.usage.cached_tokens
        check_prompt_tokens(prompt, cached, len(order.token_ids))
        return Piece(cached_tokens=cached, prompt_tokens=prompt)

    async def _version(self) -> str:
        status, answer = await self._wire.get("/version")
        if status != 200:
            return ""
        return str(decoded(answer, dict[str, Any], "/version").get("version"))[:64]

    async def _check_tokenizer(self, probe: ProbeTexts) -> None:
        for text, ours in probe.tokens.items():
            body = {"model": self._model, "prompt": text, "add_special_tokens": False}
            answer = await self._wire.post_checked("/tokenize", body, _Tokenized, is_long=False)
            if answer.tokens != ours:
                raise UpstreamRefused(
                    "the server has another tokenizer than ENGINE_MODEL; name the same model"
                )

    async def _metrics(self) -> tuple[dict[str, str], str]:
        """The labels of the cache's configuration, and when the process was started."""
        status, answer = await self._wire.get("/metrics")
        if status != 200:
            return {}, ""
        start, cache = _START.search(answer), _CACHE.search(answer)
        labels = {} if cache is None else dict(_LABEL.findall(cache[1].decode("utf-8", "replace")))
        return labels, "" if start is None else start[1].decode()


def _decode_event(data: bytes) -> _Completion:
    try:
        answer = _event.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UpstreamError("an event of another form") from None
    if answer.error is not None:
        raise UpstreamError("the server ended the stream with an error")
    if len(answer.choices) > 1:
        raise UpstreamError("more choices than were asked for")
    return answer


def _number(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and 0 < int(text) < 2**31 else None
