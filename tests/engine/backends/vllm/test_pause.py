"""A whole vLLM with its processes: what is asked of it while it is paused, and afterwards."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

vllm = pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from engine.backends.external import Order
from engine.backends.vllm.core import TurnFailed, VllmCore
from engine.backends.vllm.directive import Directive, Want
from engine.schedule.runner import SampleParams
from tests.engine.backends.local import request
from tests.engine.backends.vllm.simulator import tokens_of, transfer_config

pytestmark = [pytest.mark.anyio, pytest.mark.timeout(600)]
PREFIX = tokens_of("prefix", 320)
RETRY_SECONDS = 2.0
"""A vLLM that queues what comes while it is paused has said nothing after so long."""


@pytest.fixture
async def llm(llama: Path) -> "AsyncIterator[vllm.AsyncLLMEngine]":
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = vllm.AsyncEngineArgs(
        model=str(llama),
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=2048,
        num_gpu_blocks_override=128,
        kv_transfer_config=transfer_config(),
    )
    llm = AsyncLLM.from_vllm_config(arguments.create_engine_config(), stat_loggers=[])
    yield llm
    llm.shutdown()


async def count_tokens(core: VllmCore, name: str, *wants: Want) -> int:
    order = Order(
        order_id=name,
        scope="scope",
        token_ids=PREFIX,
        request=request(),
        sample=SampleParams(temperature=0, top_p=1, top_k=0, seed=0),
        max_tokens=4,
    )
    outputs = core.generate(order, Directive(request_id=name, scope="scope", wants=[*wants]))
    return sum([len(output.token_ids) async for output in outputs])


async def test_a_pause_ends_at_most_the_turn_that_came_during_it(
    llm: "vllm.AsyncLLMEngine",
) -> None:
    core = VllmCore(llm, 1000, takes_seeds=False, is_owner=False)
    await core.bind()
    want = Want(key="00" * 32, tokens=320, expires_at=1e12, is_asked_for=True)
    assert await count_tokens(core, "before", want) == 4
    await llm.pause_generation(mode="abort", clear_cache=False)
    during = asyncio.create_task(count_tokens(core, "during"))
    await asyncio.wait([during], timeout=RETRY_SECONDS)
    assert (await core.stats()).leased_blocks == 10
    await llm.resume_generation()
    (outcome,) = await asyncio.gather(during, return_exceptions=True)
    # vLLM 0.33 answers it at once, and earlier ones after the pause.
    if isinstance(outcome, TurnFailed):
        assert outcome.code == "not_ready"
        assert "RetryableRequestError" in str(outcome)
    else:
        assert outcome == 4
    assert await count_tokens(core, "after") == 4
    report = await core.report("after")
    assert report is not None and report.hit_tokens == 288
