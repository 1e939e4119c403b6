"""An unmodified `llama-server` of llama.cpp: token ids to `/completion`, a slot for each scope.

A slot keeps what was computed in it last, and tells with the first token how much of that it used
again (`timings.cache_n`). What another scope left in a slot is computed over (`cache_prompt`). A
server with a prompt cache in host memory (`--cache-ram`) shares it between slots: it is refused.
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec

from engine.backends.upstream.server import (
    Facts,
    ModelFacts,
    Order,
    Piece,
    Server,
    UpstreamRefused,
)
from engine.backends.upstream.wire import UpstreamError, UpstreamGone, Wire, decoded
from engine.protocol import FinishReason

COMPLETION = "/completion"
MAX_SLOTS = 1024
_FIELDS = ["tokens", "stop", "stop_type", "tokens_evaluated", "timings"]
"""Of the last event, which has the whole prompt else."""
_FINISH: dict[str, FinishReason] = {"eos": "stop", "limit": "length"}


class _Generation(msgspec.Struct):
    n_ctx: int


class _Props(msgspec.Struct):
    total_slots: int
    default_generation_settings: _Generation
    model_path: str = ""
    build_info: str = ""


class _Text(msgspec.Struct):
    content: str


class _Timings(msgspec.Struct, frozen=True):
    cache_n: int | None = None


class _Event(msgspec.Struct):
    """One event of a stream. With `prompt_progress` its `tokens` are none that were sampled."""

    tokens: list[int] = []
    stop: bool = False
    stop_type: str = ""
    tokens_evaluated: int | None = None
    timings: _Timings = _Timings()
    prompt_progress: Any = None
    error: Any = None


class LlamaCppServer(Server):
    def __init__(self, wire: Wire, files: ModelFacts, block_size: int) -> None:
        """`block_size` in tokens: our books count in blocks, and the server does not."""
        super().__init__(wire, files)
        self._block_size = block_size

    async def find_facts(self) -> Facts:
        props = await self._wire.get("/props", _Props)
        if not 0 < props.total_slots <= MAX_SLOTS:
            raise UpstreamRefused(f"the server says that it has {props.total_slots} slots")
        context = self._files.context(props.default_generation_settings.n_ctx)
        for text, ours in self._files.probes.items():
            # Ids must mean the same text; how text is cut into ids is our business alone.
            if (await self._wire.post("/detokenize", {"tokens": ours}, _Text)).content != text:
                raise UpstreamRefused(
                    "the server has another vocabulary than ENGINE_MODEL; name the same model"
                )
        return Facts(
            kind="llamacpp",
            model=props.model_path[-256:],
            version=props.build_info[:64],
            max_context_tokens=context,
            max_running=props.total_slots,
            tells="with_tokens",
            isolation="slots",
            block_size=self._block_size,
            num_blocks=max(props.total_slots * context // self._block_size, 8),
            capabilities=frozenset({"multiple_choices"}),
            takes_grammars=False,
            forced_note="its grammars are of another form than ours",
        )

    async def prefill(self, order: Order) -> Piece:
        async with aclosing(self.generate(order)) as pieces:
            async for piece in pieces:
                if piece.token_ids or piece.is_last:
                    return piece
        raise UpstreamError("an answer without a token")

    async def generate(self, order: Order) -> AsyncGenerator[Piece, None]:
        num_tokens = 0
        async for data in self._wire.events(COMPLETION, self._body(order)):
            event = decoded(data, _Event, COMPLETION)
            if event.error is not None:
                raise UpstreamError("the server ended the stream with an error")
            if event.prompt_progress is not None:
                continue
            tokens = self._files.check_tokens(event.tokens)
            num_tokens += len(tokens)
            if num_tokens > order.max_tokens:
                raise UpstreamError("more tokens than were asked for")
            cached = event.timings.cache_n
            if event.tokens_evaluated is None or cached is None:
                raise UpstreamError("an answer without counts")
            order.check_counts(event.tokens_evaluated, cached)
            if cached and not order.may_reuse:
                raise UpstreamError("the server reused what it was told to compute")
            yield Piece(
                token_ids=tokens,
                cached_tokens=cached,
                prompt_tokens=event.tokens_evaluated,
                is_last=event.stop,
                finish=_FINISH.get(event.stop_type),
            )
            if event.stop:
                return
        raise UpstreamGone("the stream ended without a reason")

    def _body(self, order: Order) -> dict[str, Any]:
        sample = order.sample
        return {
            "prompt": list(order.token_ids),
            "n_predict": order.max_tokens,
            "stream": True,
            "id_slot": order.slot,
            "cache_prompt": order.may_reuse,
            "n_cache_reuse": 0,
            "return_tokens": True,
            "return_progress": True,
            "timings_per_token": True,
            "response_fields": _FIELDS,
            "temperature": sample.temperature,
            "top_p": sample.top_p,
            "top_k": sample.top_k,
            "min_p": 0.0,
            "typical_p": 1.0,
            "repeat_penalty": 1.0,
            "repeat_last_n": 0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "dry_multiplier": 0.0,
            "xtc_probability": 0.0,
            "mirostat": 0,
            "seed": sample.seed % 2**32 if order.is_seeded else -1,
            # It makes the server's own ends of a turn impossible, so only where nothing may end it.
            "ignore_eos": not order.end_token_ids,
        }
