"""A running `vllm.AsyncLLM`: orders, images, adapters, and the calls to our connector in it.

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
"""Far from the ids of vLLM's own clients, which are numbers from 1 on."""
LOAD_SECONDS = 300.0
"""How many seconds vLLM has to take an adapter."""
MAX_DECODING = 2
"""The most prompts whose images are decoded at a time. One prompt may have 300 MB of pixels."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """What came since the output before it."""

    token_ids: Sequence[TokenId]
    is_last: bool
    # The reason of FINISH_REASON_STRINGS by which vLLM ended the request without its answer.
    failure: str | None = None
    # How long the request waited, by the scheduler's clock.
    queue_seconds: float = 0.0


def _refusals() -> tuple[type[Exception], ...]:
    """The errors that vLLM raises for a request that it does not take.

    Since 0.32 some are of its own class.
    """
    from vllm import exceptions

    return ValueError, getattr(exceptions, "VLLMClientError", ValueError)


async def _prompt_of(image_prompt: ImagePrompt) -> dict[str, Any]:
    """A prompt for vLLM's processor. vLLM knows an image by its id, which only its scope has."""
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
    """Our form of a `vllm.RequestOutput`."""
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
    """vLLM does not take a request that we took for valid. The message is vLLM's, for the log."""


_CODE_OF_STATUS: dict[int, ErrorCode] = {503: "not_ready", 429: "overloaded"}


class RequestAborted(Exception):
    """vLLM gave a request up because vLLM was paused or put to sleep. It may serve the next one."""

    status_code = 503


class RequestErrored(Exception):
    """vLLM could not go on with a request.

    vLLM had not understood the request, or the request's KV did not arrive. vLLM's own servers
    answer with 500.
    """

    status_code = 500


_FAILURES: dict[str, type[RequestAborted | RequestErrored]] = {
    "abort": RequestAborted,
    "error": RequestErrored,
}
"""By reason of `vllm.v1.engine.FINISH_REASON_STRINGS`. With the others an answer is whole."""


class TurnFailed(Exception):
    """vLLM ended one request by an error of its own, and goes on.

    The message names the error's class alone, because the error's own message may tell of the
    prompt. `code` follows from the HTTP status that the error carries. In `vllm.exceptions`
    GenerationError has `status_code`, and GracefulHTTPError has `http_status`. A paused vLLM
    answers 503.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__(f"vLLM ended the request: {type(error).__name__}")
        status = getattr(error, "http_status", getattr(error, "status_code", 500))
        self.code = _CODE_OF_STATUS.get(status, "internal")


class VllmCore:
    """The calls that the engine's server makes to vLLM."""

    def __init__(
        self, llm: Any, vocabulary_size: int, *, takes_seeds: bool, is_owner: bool
    ) -> None:
        """`llm` is a vllm.AsyncLLM. Its sampler takes a `top_k` up to `vocabulary_size`.

        Without `takes_seeds` seeds are left out: vLLM's CPU build ends with an error if the prompt
        of a request with a seed is computed in several steps. With `is_owner` vLLM ends when we
        end.
        """
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
        """Tell the connector the token that our directives carry. Must precede `generate`."""
        return msgspec.convert(await self._call("bind", self._token), Bound)

    async def switch_off(self, reason: str) -> None:
        """End all holds for good. It is for when nobody keeps books of them any more."""
        await self._call("switch_off", reason)

    async def show_first(self, image_prompt: ImagePrompt, marks: Collection[TokenId]) -> Expanded:
        """Expand a prompt with one image, as `expand` does, and keep the prompt.

        Later `expand` tries other images alone in this image's place. That place is one of the
        tokens `marks`.
        """
        self._alone = image_prompt.token_ids
        expanded = await self.expand(image_prompt)
        [(start, _)] = expanded.spans
        # The text's token in front of the image may be joined with the image's first token.
        candidates = enumerate(image_prompt.token_ids[start : start + 2], start)
        places = [place for place, token in candidates if token in marks][:1]
        self._place = image_prompt.token_ids[places[0]] if places else None
        return expanded._replace(places=places)

    async def expand(self, image_prompt: ImagePrompt) -> Expanded:
        """The tokens of a prompt with images, as vLLM makes them.

        Raises ImageRefused, and PromptTooLong.
        """
        refusal: Exception
        # Gemma 3's processor raises RuntimeError at one line break behind an image.
        refusals: tuple[type[Exception], ...] = (*_refusals(), RuntimeError)
        try:
            return await self._expand(image_prompt)
        except refusals as error:
            refusal = error
        if getattr(refusal, "parameter", None) == "input_tokens":
            length = getattr(refusal, "value", 0)
            raise PromptTooLong(length, self._llm.model_config.max_model_len - 1) from refusal
        for image in image_prompt.images[:-1]:
            try:
                await self._expand(ImagePrompt(self._alone, [image]))
            except refusals as error:
                raise ImageRefused(image) from error
        # The last image is at fault, or it is one more than vLLM takes.
        raise ImageRefused(image_prompt.images[-1]) from refusal

    async def _expand(self, image_prompt: ImagePrompt) -> Expanded:
        """Expand once. Raises what vLLM raises.

        vLLM has two caches of processed images. `skip_mm_cache` takes the one for prompts that are
        not sent on. Requests that are sent fill the other one, and the scheduler's process must
        have got every image that is in it.
        """
        async with self._decoding:
            prompt = await _prompt_of(image_prompt)
            (processed,) = await self._llm.renderer.render_cmpl_async([prompt], skip_mm_cache=True)
        spans = [(place.offset, place.length) for place in processed["mm_placeholders"]["image"]]
        token_ids = image_prompt.token_ids
        places = [place for place, token in enumerate(token_ids) if token == self._place]
        return Expanded(processed["prompt_token_ids"], spans, places)

    async def generate(self, order: Order, directive: Directive) -> AsyncIterator[Output]:
        """Run one choice to its end. A caller that stops listening must `abort` it.

        Raises OrderRefused and TurnFailed. Raises vLLM's own error if all of vLLM has ended.
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
                # Without a token the request may never have reached the scheduler, which then has
                # no report of it. So nothing is yielded.
                if output.token_ids:
                    yield replace(output, is_last=False)
                failure = _FAILURES[output.failure]()
                raise TurnFailed(failure) from failure
            is_last = output.is_last
            yield output

    async def _take(self, order: Order, directive: Directive) -> Any:
        """Have vLLM take an order, and return its collector. Raises what `generate` raises."""
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
        # The grammar covers the thinking too. Without `reasoning_ended` a server's
        # `--reasoning-parser` would apply the grammar only once the model has ended its thinking.
        adding = self._llm.add_request(
            order.order_id,
            {**prompt, "cache_salt": order.cache_salt},
            self._sampling_params(replace(order, image_prompt=None), directive),
            lora_request=self._adapters.get(order.adapter),
            reasoning_ended=True,
            # By vLLM's policy `priority` a higher number comes later. `fcfs` ignores the number.
            priority=int(order.is_batch),
        )
        if order.image_prompt is not None:
            # vLLM relies on its scheduler's process getting each image that was processed. So an
            # order that is cancelled meanwhile is sent all the same.
            # No local has the task: it would hold the prompt while vLLM answers.
            self._adding[order.order_id] = asyncio.ensure_future(adding)
            adding = asyncio.shield(self._adding[order.order_id])
        return await adding

    def _sampling_params(self, order: Order, directive: Directive) -> Any:
        """How vLLM draws an order's tokens, and the directive for our connector."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        directive = msgspec.structs.replace(directive, token=self._token)
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
                    PARAM_KEY: msgspec.to_builtins(directive),
                    # For vLLM's OffloadingConnector: what is not marked is not offloaded.
                    "max_offload_tokens": max((want.tokens for want in directive.wants), default=0),
                }
            },
        )

    async def abort(self, order_id: str) -> None:
        """End an order. If vLLM can't abort it, vLLM computes it to its end and nobody reads it."""
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

        vLLM knows an adapter by its name, and vLLM's cache knows it by name and path. So its name
        is the digest.
        """
        from vllm.lora.request import LoRARequest

        request = LoRARequest(digest, next(self._adapter_ids), directory)
        try:
            await self._llm.add_lora(request)
        except Exception as error:  # whatever a call raises, vLLM raises a plain Exception
            raise StartRefused(f"vLLM: {error}") from error
        self._adapters[digest] = request

    async def remove_adapter(self, digest: str) -> None:
        """Have vLLM forget an adapter. No request may use it any more."""
        request = self._adapters.pop(digest, None)
        if request is not None:
            await self._llm.remove_lora(request.lora_int_id)

    async def report(self, request_id: str) -> Report | None:
        """What became of a directive. None for a directive that the connector never got."""
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
    """Reads adapters and has vLLM take them.

    vLLM reads an adapter's folder again whenever it has put the adapter aside. So it gets a copy of
    the files that were read and digested here. Nobody writes to the copy.
    """

    def __init__(self, core: VllmCore, event_loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._event_loop = event_loop
        self._copies = TemporaryDirectory(prefix="holdfast-adapters-")
        self._taken: set[str] = set()

    def read(self, directory: Path) -> TakenAdapter:
        """Have vLLM take an adapter. Raise StartRefused. Not for the event loop's thread."""
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
                    raise StartRefused(
                        f"vLLM has not taken the adapter within {LOAD_SECONDS:g} s"
                    ) from None
            except (OSError, StartRefused) as error:
                rmtree(copy, ignore_errors=True)
                raise StartRefused(f"{error}") from error
            self._taken.add(files.digest)
        return TakenAdapter(files.digest, files.max_rank, len(files.weights))

    def attach(self, digest: str) -> None:
        """Nothing is to be done: vLLM has the adapter already."""

    def detach(self, digest: str) -> None:
        self._taken.discard(digest)
        rmtree(Path(self._copies.name, digest), ignore_errors=True)
        asyncio.run_coroutine_threadsafe(self._core.remove_adapter(digest), self._event_loop)

    def close(self) -> None:
        self._copies.cleanup()
