"""A running `vllm.AsyncLLM`: orders, images, adapters, and the calls of our connector in it.

`directive.py` says what the calls mean.
"""

import asyncio
import secrets
from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import msgspec
import structlog

from engine.backends.external import Order, vllm_sampling
from engine.backends.prepare.images import Expanded
from engine.backends.vllm.directive import (
    CALL,
    PARAM_KEY,
    Bound,
    CoreStats,
    Directive,
    Loss,
    Report,
)
from engine.cache.ids import TokenId
from engine.errors import ImageRefused, PromptTooLong
from engine.peft import read_files
from engine.protocol import ErrorCode
from engine.refusal import StartRefused
from engine.schedule.request import ImagePrompt
from engine.store.journal import Record

log = structlog.get_logger()
FIRST_ADAPTER_ID = 2**30
"""vLLM's own clients name adapters by numbers from 1 on."""
LOAD_SECONDS = 300.0
"""Until vLLM has taken an adapter."""
MAX_DECODING = 2
"""Prompts whose images are decoded at a time: one may have 300 MB of pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What came since the last one.

    - `failure`: vLLM ended the request without its answer, by this reason of its own.
    - `queue_seconds`: by the scheduler's clock.
    """

    token_ids: Sequence[TokenId]
    is_last: bool
    failure: str | None = None
    queue_seconds: float = 0.0


def _refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it does not take: errors of its own since 0.32."""
    from vllm import exceptions

    return ValueError, getattr(exceptions, "VLLMClientError", ValueError)


async def _prompt_of(image_prompt: ImagePrompt) -> dict[str, Any]:
    """A prompt for vLLM's processor. An image is known by its id, which is its scope's alone."""
    from vllm.multimodal.media import ImageMediaIO

    def load() -> list[Any]:
        media = ImageMediaIO()
        return [media.load_bytes(image.data).media for image in image_prompt.images]

    return {
        "prompt_token_ids": list(image_prompt.token_ids),
        "multi_modal_data": {"image": await asyncio.to_thread(load)},
        "multi_modal_uuids": {"image": [image.id for image in image_prompt.images]},
    }


def _output_of(output: Any) -> Output:
    """Of a `vllm.RequestOutput`."""
    metrics = output.metrics
    completions = (completion.token_ids for completion in output.outputs)
    reasons = (completion.finish_reason for completion in output.outputs)
    return Output(
        token_ids=list(chain.from_iterable(completions)),
        is_last=output.finished,
        failure=next((reason for reason in reasons if reason in _FAILURES), None),
        queue_seconds=metrics.scheduled_ts - metrics.queued_ts if metrics else 0.0,
    )


class OrderRefused(Exception):
    """vLLM does not take a request that we hold for good; its reason is for the log."""


_CODE_OF_STATUS: dict[int, ErrorCode] = {503: "not_ready", 429: "overloaded"}


class RequestAborted(Exception):
    """vLLM gave a request up: it was paused, or put to sleep, and may serve the next one."""

    status_code = 503


class RequestErrored(Exception):
    """vLLM could not go on with a request: it had not understood it, or its KV did not arrive.

    vLLM's own servers answer it with 500.
    """

    status_code = 500


_FAILURES: dict[str, type[RequestAborted | RequestErrored]] = {
    "abort": RequestAborted,
    "error": RequestErrored,
}
"""By `vllm.v1.engine.FINISH_REASON_STRINGS`. With the other reasons an answer is whole."""


class TurnFailed(Exception):
    """vLLM ended one request by an error of its own, and goes on.

    The message is the error's class: its own may tell of the prompt. `code` is by the HTTP status
    that the error carries (of `vllm.exceptions`, GenerationError has `status_code` and
    GracefulHTTPError `http_status`): a paused vLLM answers 503.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"vLLM ended the request: {type(error).__name__}")
        status = getattr(error, "http_status", getattr(error, "status_code", 500))
        self.code = _CODE_OF_STATUS.get(status, "internal")


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
        self._adapters: dict[str, Any] = {}
        self._adapter_ids = count(FIRST_ADAPTER_ID)
        self._adding: dict[str, asyncio.Task[Any]] = {}
        self._alone: Sequence[TokenId] = ()
        self._place: TokenId | None = None
        self._decoding = asyncio.Semaphore(MAX_DECODING)

    async def bind(self) -> Bound:
        """Tell the connector the token that our directives carry. Must come before `generate`."""
        return msgspec.convert(await self._call("bind", self._token), Bound)

    async def switch_off(self, reason: str) -> None:
        """End all holds for good: nobody keeps books of them any more."""
        await self._call("switch_off", reason)

    async def show_first(self, image_prompt: ImagePrompt, marks: Collection[TokenId]) -> Expanded:
        """As `expand`, of a prompt with one image, in whose place others are tried alone later.

        One of the tokens `marks` is that place.
        """
        self._alone = image_prompt.token_ids
        expanded = await self.expand(image_prompt)
        [(start, _)] = expanded.spans
        # The text's token in front of it may be joined with the image's first.
        near = enumerate(image_prompt.token_ids[start : start + 2], start)
        places = [place for place, token in near if token in marks][:1]
        self._place = image_prompt.token_ids[places[0]] if places else None
        return expanded._replace(places=places)

    async def expand(self, image_prompt: ImagePrompt) -> Expanded:
        """The tokens of a prompt with images, as vLLM makes them. Raises ImageRefused."""
        refused: Exception
        # Gemma 3's processor raises RuntimeError at one line break behind an image.
        refusals: tuple[type[Exception], ...] = (*_refusals(), RuntimeError)
        try:
            return await self._expand(image_prompt)
        except refusals as error:
            refused = error
        if getattr(refused, "parameter", None) == "input_tokens":
            length = getattr(refused, "value", 0)
            raise PromptTooLong(length, self._llm.model_config.max_model_len - 1) from refused
        for image in image_prompt.images[:-1]:
            try:
                await self._expand(ImagePrompt(self._alone, [image]))
            except refusals as error:
                raise ImageRefused(image) from error
        # It is the last one, or one more than vLLM takes.
        raise ImageRefused(image_prompt.images[-1]) from refused

    async def _expand(self, image_prompt: ImagePrompt) -> Expanded:
        """vLLM has a cache for what is not sent on. What is in its other one, which a sent request
        fills, the scheduler's process must have got."""
        async with self._decoding:
            prompt = await _prompt_of(image_prompt)
            (processed,) = await self._llm.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        spans = [(place.offset, place.length) for place in processed["mm_placeholders"]["image"]]
        places = [at for at, token in enumerate(image_prompt.token_ids) if token == self._place]
        return Expanded(processed["prompt_token_ids"], spans, places)

    async def generate(self, order: Order, directive: Directive) -> AsyncIterator[Output]:
        """Run one choice to its end; who stops listening must `abort` it.

        Raises OrderRefused, TurnFailed, and vLLM's own error where all of vLLM has ended.
        """
        collector = await self._take(order, directive)
        # Neither pixels nor files are kept while vLLM answers.
        del order
        is_last = False
        while not is_last:
            try:
                output = _output_of(await collector.get())
            except _refusals() as error:
                raise OrderRefused(str(error)) from error
            except Exception as error:  # the edge: a paused vLLM ends a turn that it had taken
                if self._llm.errored:
                    raise
                raise TurnFailed(error) from error
            if output.failure is not None:
                # One without a token may never have met the scheduler: nothing is told of it.
                if output.token_ids:
                    yield replace(output, is_last=False)
                failure = _FAILURES[output.failure]()
                raise TurnFailed(failure) from failure
            is_last = output.is_last
            yield output

    async def _take(self, order: Order, directive: Directive) -> Any:
        """Have vLLM take an order, and return its collector. Raises as `generate`."""
        try:
            collector = await self._add(order, directive)
        except _refusals() as error:
            self._adding.pop(order.order_id, None)
            raise OrderRefused(str(error)) from error
        except Exception as error:  # the edge: what vLLM raises is the end of this turn alone
            self._adding.pop(order.order_id, None)
            if self._llm.errored:
                raise
            raise TurnFailed(error) from error
        self._adding.pop(order.order_id, None)
        return collector

    async def _add(self, order: Order, directive: Directive) -> Any:
        prompt: dict[str, Any] = {"prompt_token_ids": list(order.token_ids)}
        if order.image_prompt is not None:
            async with self._decoding:
                prompt = await _prompt_of(order.image_prompt)
        # The grammar knows what may be thought. Without `reasoning_ended` a server's
        # `--reasoning-parser` would leave it unapplied until the model ends its thinking.
        adding = self._llm.add_request(
            order.order_id,
            {**prompt, "cache_salt": order.cache_salt},
            self._sampling_params(replace(order, image_prompt=None), directive),
            lora_request=self._adapters.get(order.adapter),
            reasoning_ended=True,
            # Of the policy `priority`: a higher number comes later. `fcfs` ignores it.
            priority=int(order.is_batch),
        )
        if order.image_prompt is not None:
            # vLLM counts on it that the scheduler's process gets each image that it has
            # processed: an order that is cancelled meanwhile is sent all the same.
            # No local has the task: it would hold the prompt while vLLM answers.
            self._adding[order.order_id] = asyncio.ensure_future(adding)
            adding = asyncio.shield(self._adding[order.order_id])
        return await adding

    def _sampling_params(self, order: Order, directive: Directive) -> Any:
        """How vLLM draws an order's tokens, and what our connector is told with it."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        known = msgspec.structs.replace(directive, token=self._token)
        structured = None
        if order.grammar is not None:
            structured = StructuredOutputsParams(grammar=order.grammar)
        return SamplingParams(
            **vllm_sampling(order, self._vocabulary_size, takes_seeds=self._takes_seeds),
            detokenize=False,
            output_kind=RequestOutputKind.DELTA,
            structured_outputs=structured,
            extra_args={
                "kv_transfer_params": {
                    PARAM_KEY: msgspec.to_builtins(known),
                    # For vLLM's OffloadingConnector: what is not marked stays where it is.
                    "max_offload_tokens": max((want.tokens for want in known.wants), default=0),
                }
            },
        )

    async def abort(self, order_id: str) -> None:
        """Where vLLM can't abort it, it computes it to its end, and nobody reads that."""
        adding = self._adding.pop(order_id, None)
        if adding is not None:
            await asyncio.wait([adding])
        try:
            await self._llm.abort(order_id)
        except Exception as error:  # the edge, as in `generate`
            if self._llm.errored:
                raise
            log.error("vLLM did not abort a request", error=type(error).__name__)

    async def add_adapter(self, digest: str, directory: str) -> None:
        """Have vLLM compute an adapter. Raise StartRefused with vLLM's reason.

        vLLM knows adapters by name, and its cache by name and path: the name is the digest.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(digest, next(self._adapter_ids), directory)
        try:
            await self._llm.add_lora(request)
        except Exception as error:  # vLLM tells whatever a call raised as a plain Exception
            raise StartRefused(f"vLLM: {error}") from error
        self._adapters[digest] = request

    async def remove_adapter(self, digest: str) -> None:
        """No request has it any more."""
        request = self._adapters.pop(digest, None)
        if request is not None:
            await self._llm.remove_lora(request.lora_int_id)

    async def report(self, request_id: str) -> Report | None:
        """What became of a directive; None for one that the connector never met."""
        return msgspec.convert(await self._call("report", request_id), Report | None)

    async def release(self, keys: Sequence[str]) -> None:
        await self._call("release", list(keys))

    async def unlease(self, keys: Sequence[str]) -> None:
        await self._call("unlease", list(keys))

    async def record(self, records: Sequence[Record]) -> None:
        await self._call("record", msgspec.json.encode(records))

    async def losses(self) -> list[Loss]:
        return msgspec.convert(await self._call("losses"), list[Loss])

    async def stats(self) -> CoreStats:
        return msgspec.convert(await self._call("core_stats"), CoreStats)

    def shut_down(self) -> None:
        if self._is_owner:
            self._llm.shutdown()

    async def _call(self, name: str, *arguments: Any) -> Any:
        return await self._llm.engine_core.call_utility_async(CALL.format(name), *arguments)


class TakenAdapter(NamedTuple):
    digest: str
    rank: int
    num_bytes: int
    invocation: tuple[TokenId, ...] = ()


class VllmAdapters:
    """vLLM reads an adapter's folder again whenever it has put the adapter aside. So it is given a
    copy of what was read and digested here, which nobody writes to.
    """

    def __init__(self, core: VllmCore, event_loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._event_loop = event_loop
        self._copies = TemporaryDirectory(prefix="holdfast-adapters-")
        self._taken: set[str] = set()

    def read(self, directory: Path) -> TakenAdapter:
        """Have vLLM take an adapter. Raise StartRefused. Not called on the event loop's thread."""
        files = read_files(directory)
        if files.invocation:
            raise StartRefused("`alora_invocation_tokens`: vLLM has no activated LoRA")
        if files.digest not in self._taken:
            copy = Path(self._copies.name, files.digest)
            try:
                files.write(copy)
                adding = self._core.add_adapter(files.digest, str(copy))
                taking = asyncio.run_coroutine_threadsafe(adding, self._event_loop)
                try:
                    taking.result(LOAD_SECONDS)
                except TimeoutError:
                    taking.cancel()
                    raise StartRefused(f"vLLM has not taken it in {LOAD_SECONDS:g} s") from None
            except (OSError, StartRefused) as error:
                rmtree(copy, ignore_errors=True)
                raise StartRefused(f"{error}") from error
            self._taken.add(files.digest)
        return TakenAdapter(files.digest, files.max_rank, len(files.weights))

    def attach(self, digest: str) -> None:
        """vLLM has it already."""

    def detach(self, digest: str) -> None:
        self._taken.discard(digest)
        rmtree(Path(self._copies.name, digest), ignore_errors=True)
        asyncio.run_coroutine_threadsafe(self._core.remove_adapter(digest), self._event_loop)

    def close(self) -> None:
        self._copies.cleanup()
