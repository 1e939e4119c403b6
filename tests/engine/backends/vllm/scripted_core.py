"""The vLLM backend with all real but vLLM: a core in its place writes what it is told to.

It reuses whole blocks of what it has seen, as vLLM does. Nothing here imports vLLM.
"""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import anyio.to_thread

from engine.backends.vllm.backend import VllmBackend, VllmParts
from engine.backends.vllm.directive import CoreStats, Directive, Held, Loss, Report
from engine.backends.vllm.loop import Order, Output, StepCounts, VllmCore
from engine.cache.ids import TokenId
from engine.clock import ManualClock
from engine.protocol import (
    Breakpoint,
    Description,
    Finished,
    GenerateRequest,
    Part,
    Prompt,
    Sampling,
    Started,
)
from engine.settings import Settings
from engine.supervisor import Supervisor
from engine.text.renderer import ChatRenderer
from tests.engine.text.written_calls import parts_of

BLOCK = 16


class ScriptedCore(VllmCore):
    """Writes `text`; keeps all blocks that it computed, and holds every entry that is wanted."""

    def __init__(self, model: ChatRenderer) -> None:
        super().__init__(None, 100_000, takes_seeds=True, is_owner=True)
        self.text = ""
        self.prompts: list[list[TokenId]] = []
        self._model = model
        self._held: set[str] = set()
        self._reports: dict[str, Report] = {}

    async def bind(self) -> None:
        pass

    async def generate(self, order: Order) -> AsyncIterator[Output]:
        hit = self.reusable(order.token_ids)
        self.prompts.append(list(order.token_ids))
        self._reports[order.order_id] = self._report(order.directive, hit)
        written = self._model.tokenizer.encode(self.text, add_special_tokens=False).ids
        sampled = [*written, order.end_token_ids[0]]
        for index, token in enumerate(sampled):
            is_last = index == len(sampled) - 1
            yield Output(token_ids=[token], is_last=is_last, num_cached_tokens=hit)

    def reusable(self, tokens: Sequence[TokenId]) -> int:
        """Whole blocks of an earlier prompt; vLLM computes a prompt's last token always."""
        most = 0
        for known in self.prompts:
            pairs = zip(known, tokens[:-1], strict=False)
            same = next((i for i, (a, b) in enumerate(pairs) if a != b), None)
            same = min(len(known), len(tokens) - 1) if same is None else same
            most = max(most, same // BLOCK * BLOCK)
        return most

    def _report(self, directive: Directive, hit: int) -> Report:
        has_read = directive.read in self._held and hit >= directive.read_tokens
        self._held |= {want.key for want in directive.wants}
        return Report(
            request_id=directive.request_id,
            hit_tokens=hit,
            read_tokens=directive.read_tokens if has_read else 0,
            held=[Held(key=w.key, state="leased", tokens=w.tokens) for w in directive.wants],
        )

    async def report(self, request_id: str) -> Report:
        return self._reports[request_id]

    async def abort(self, order_id: str) -> None:
        pass

    async def release(self, keys: Sequence[str]) -> None:
        self._held -= set(keys)

    async def unlease(self, keys: Sequence[str]) -> None:
        pass

    async def losses(self) -> list[Loss]:
        return []

    async def stats(self) -> CoreStats:
        return CoreStats(**dict.fromkeys(CoreStats.__struct_fields__, 0))

    def shut_down(self) -> None:
        pass


def parts(core: ScriptedCore, model: ChatRenderer) -> VllmParts:
    description = Description(
        backend="vllm",
        model="scripted",
        epoch="",
        max_context_tokens=32768,
        block_size=BLOCK,
        num_blocks=4096,
        granularity=BLOCK,
        min_cache_tokens=BLOCK,
        capabilities=["tools", "thinking"],
        tool_format=model.tool_format,
        reasoning_format=model.reasoning_format,
    )
    return VllmParts(core=core, counts=StepCounts(), renderer=model, description=description)


@asynccontextmanager
async def loaded(
    core: ScriptedCore, model: ChatRenderer
) -> AsyncIterator[tuple[VllmBackend, list[BaseException]]]:
    """The backend on this core, and the crashes that it tells of; it stops at the end."""
    crashes: list[BaseException] = []
    backend = VllmBackend(
        Settings(secret="0" * 16),
        ManualClock(),
        crashes.append,
        Supervisor(),
        lambda _settings, _progress: parts(core, model),
    )
    await anyio.to_thread.run_sync(backend.load, lambda _stage, _fraction: None)
    try:
        yield backend, crashes
    finally:
        await backend.stop()


def marks(prompt: Prompt) -> list[int]:
    """The system prompt, and the last segment of all."""
    return [len(prompt.tools) + len(prompt.system) - 1, prompt.num_segments - 1]


async def said(
    backend: VllmBackend, number: int, prompt: Prompt, *, thinking: bool
) -> tuple[Started, list[Part], Finished]:
    request = GenerateRequest(
        request_id=f"turn-{number}",
        scope="0" * 32,
        prompt=prompt,
        sampling=Sampling(max_tokens=2000),
        breakpoints=[Breakpoint(segment) for segment in marks(prompt)],
        thinking=thinking,
    )
    frames = [frame async for frame in await backend.open(request) if frame is not None]
    (started,) = [frame for frame in frames if isinstance(frame, Started)]
    (finished,) = [frame for frame in frames if isinstance(frame, Finished)]
    return started, list(parts_of(frames)), finished
