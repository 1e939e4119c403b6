"""A request that ends before its first token: vLLM's scheduler is asked what it computed of it."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from engine.backends.vllm.loop import Order, Output
from engine.errors import DuplicateRequest
from engine.protocol import FinalCounts, GenerateRequest, Message, Prompt, Sampling, TextPart
from engine.settings import DEMO_MODEL
from engine.text.renderer import ChatRenderer
from tests.engine.backends.vllm.scripted_core import ScriptedCore, loaded

pytestmark = pytest.mark.anyio


class PrefillingCore(ScriptedCore):
    """Prefills for ever. It tells what it computed once `is_asked` may be answered."""

    def __init__(self, model: ChatRenderer) -> None:
        super().__init__(model)
        self.may_answer = asyncio.Event()
        self.calls: list[tuple[str, str]] = []
        self.is_prefilling = asyncio.Event()

    async def generate(self, order: Order) -> AsyncIterator[Output]:
        self.is_prefilling.set()
        await asyncio.sleep(3600)
        yield Output(token_ids=[], is_last=True, num_cached_tokens=0)

    async def abort(self, order_id: str) -> None:
        self.calls.append(("abort", order_id))

    async def computed(self, request_id: str) -> int:
        self.calls.append(("computed", request_id))
        await self.may_answer.wait()
        return 96


def ask() -> GenerateRequest:
    return GenerateRequest(
        request_id="one",
        scope="0" * 32,
        prompt=Prompt([Message("user", [TextPart("Hello there.")])]),
        sampling=Sampling(max_tokens=4),
    )


async def test_its_counts_come_when_vllm_has_told() -> None:
    model = ChatRenderer.from_model(DEMO_MODEL)
    core = PrefillingCore(model)
    async with loaded(core, model) as (backend, crashes):
        frames = await backend.open(ask())
        await core.is_prefilling.wait()
        assert await backend.cancel("one")
        assert await backend.unacknowledged() == []
        with pytest.raises(DuplicateRequest):
            await backend.open(ask())
        core.may_answer.set()
        async with asyncio.timeout(60):
            while not (told := await backend.unacknowledged()):
                await asyncio.sleep(0.01)
        (counts,) = told
        assert isinstance(counts, FinalCounts)
        assert (counts.reason, counts.usage, counts.prefilled_tokens) == ("cancelled", None, 96)
        counters = (await backend.stats()).counters
        assert counters.prefilled_tokens == counters.computed_tokens == 96
        frames.close()
        (asked,) = [i for i, (name, _) in enumerate(core.calls) if name == "computed"]
        assert core.calls[0][0] == "abort" and asked > 0, "nothing is computed behind an abort"
    assert not crashes
