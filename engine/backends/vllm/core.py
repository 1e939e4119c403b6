"""vLLM's engine as our server talks to it: token ids in, token ids out, and the connector's calls.

AsyncLLM runs the scheduler in a process of its own. Everything here is called from one event loop.
"""

import secrets
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from engine.backends.vllm.directive import (
    BIND,
    CORE_STATS,
    LOSSES,
    PARAM_KEY,
    RELEASE,
    REPORT,
    SWITCH_OFF,
    UNLEASE,
    CoreStats,
    Directive,
    Loss,
    Report,
)
from engine.cache.ids import TokenId
from engine.schedule.runner import SampleParams

_MAX_SEED = 2**63


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """What one choice asks of vLLM. `max_tokens` None is what the context leaves.

    `is_seeded`: the client asked for draws that can be repeated.
    `end_token_ids` end it, and nothing else does; `grammar` is in llguidance's form of Lark.
    """

    order_id: str
    salt: str
    token_ids: Sequence[TokenId]
    sample: SampleParams
    is_seeded: bool
    max_tokens: int | None
    end_token_ids: Sequence[TokenId]
    directive: Directive
    grammar: str | None = None
    is_batch: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What came since the last one; `queue_seconds` by the scheduler's clock."""

    token_ids: Sequence[TokenId]
    is_last: bool
    num_cached_tokens: int
    queue_seconds: float = 0.0


class OrderRefused(Exception):
    """vLLM does not take a request that we hold for good; its reason is for the log."""


class VllmCore:
    """`llm` is a vllm.AsyncLLM; `vocabulary_size` bounds what its sampler takes for `top_k`.

    `takes_seeds`: vLLM's CPU build ends with an error when a request with a seed has its prompt
    computed in several steps, so there seeds are left out. `is_owner`: vLLM ends when we end.
    """

    def __init__(
        self, llm: Any, vocabulary_size: int, *, takes_seeds: bool, is_owner: bool
    ) -> None:
        self._llm = llm
        self._is_owner = is_owner
        self._token = secrets.token_hex(32)
        self._vocabulary_size = vocabulary_size
        self._takes_seeds = takes_seeds

    async def bind(self) -> None:
        """Tell the connector the token that our directives carry. Must come before `generate`."""
        await self._call(BIND, self._token)

    async def switch_off(self, reason: str) -> None:
        """End all holds for good: nobody keeps books of them any more."""
        await self._call(SWITCH_OFF, reason)

    async def generate(self, order: Order) -> AsyncIterator[Output]:
        """Run one choice to its end; who stops listening must `abort` it. Raises OrderRefused."""
        prompt = {"prompt_token_ids": list(order.token_ids), "cache_salt": order.salt}
        try:
            params = self._params(order)
            # The grammar knows what may be thought. Without this a server's `--reasoning-parser`
            # would leave it unapplied until the model ends its thinking.
            collector = await self._llm.add_request(
                order.order_id,
                prompt,
                params,
                reasoning_ended=True,
                # Of the policy `priority`: a higher number comes later. `fcfs` ignores it.
                priority=int(order.is_batch),
            )
        except ValueError as error:
            raise OrderRefused(str(error)) from error
        while True:
            output = await collector.get()
            metrics = output.metrics
            yield Output(
                token_ids=[token for one in output.outputs for token in one.token_ids],
                is_last=output.finished,
                num_cached_tokens=output.num_cached_tokens or 0,
                queue_seconds=metrics.scheduled_ts - metrics.queued_ts if metrics else 0.0,
            )
            if output.finished:
                return

    async def abort(self, order_id: str) -> None:
        await self._llm.abort(order_id)

    async def report(self, request_id: str) -> Report:
        """What became of a directive; raises RuntimeError for one never heard of."""
        report = await self._call(REPORT, request_id)
        if report is None:
            raise RuntimeError("the connector has no report of a request that began to answer")
        return msgspec.convert(report, Report)

    async def computed(self, request_id: str) -> int:
        """Tokens of a prompt that were scheduled; 0 for a request that the connector never met."""
        report = await self._call(REPORT, request_id)
        return 0 if report is None else msgspec.convert(report, Report).computed_tokens

    async def release(self, keys: Sequence[str]) -> None:
        await self._call(RELEASE, list(keys))

    async def unlease(self, keys: Sequence[str]) -> None:
        await self._call(UNLEASE, list(keys))

    async def losses(self) -> list[Loss]:
        return msgspec.convert(await self._call(LOSSES), list[Loss])

    async def stats(self) -> CoreStats:
        return msgspec.convert(await self._call(CORE_STATS), CoreStats)

    def shut_down(self) -> None:
        if self._is_owner:
            self._llm.shutdown()

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._llm.engine_core.call_utility_async(name, *arguments)

    def _params(self, order: Order) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        sample = order.sample
        directive = msgspec.structs.replace(order.directive, token=self._token)
        structured = None
        if order.grammar is not None:
            structured = StructuredOutputsParams(grammar=order.grammar)
        return SamplingParams(
            temperature=sample.temperature,
            top_p=sample.top_p,
            top_k=sample.top_k if sample.top_k < self._vocabulary_size else 0,
            seed=sample.seed % _MAX_SEED if order.is_seeded and self._takes_seeds else None,
            presence_penalty=sample.presence_penalty,
            frequency_penalty=sample.frequency_penalty,
            logit_bias={t: b for t, b in sample.bias.items() if t < self._vocabulary_size} or None,
            max_tokens=order.max_tokens,
            # Whatever the model's files say ends a turn: we say it.
            ignore_eos=True,
            stop_token_ids=list(order.end_token_ids),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=structured,
            extra_args={"kv_transfer_params": {PARAM_KEY: msgspec.to_builtins(directive)}},
        )


@dataclass(slots=True)
class StepCounts:
    """`running` requests of ours in vLLM's last step. `preempted` requests of all, ever.

    `failure` says why nothing is counted any more.
    """

    failure: str | None = None
    running: int = 0
    preempted: int = 0

    def check(self) -> None:
        """Raise RuntimeError where vLLM's steps are not counted any more."""
        if self.failure is not None:
            raise RuntimeError(f"the stat logger is off: {self.failure}")
