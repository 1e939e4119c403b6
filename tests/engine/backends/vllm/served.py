"""Run by test_processes.py: vLLM in its processes, our connector a child of MultiConnector.

Prints what happened as one line of JSON.
"""

import asyncio
import json
import sys
from typing import Any

import msgspec
from prometheus_client import REGISTRY
from vllm import SamplingParams
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.v1.engine.async_llm import AsyncLLM

from engine.backends.vllm import directive

TOKEN = "token-of-the-tests"
PROMPT = [10 + index % 4000 for index in range(660)]


def arguments(model: str) -> AsyncEngineArgs:
    child = {"kv_connector": "HoldfastConnector", "kv_role": "kv_producer"}
    return AsyncEngineArgs(
        model=model,
        dtype="float32",
        enforce_eager=True,
        block_size=32,
        max_model_len=2048,
        max_num_batched_tokens=256,
        num_gpu_blocks_override=128,
        kv_transfer_config={
            "kv_connector": "MultiConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"connectors": [child]},
        },
    )


def params(name: str, max_tokens: int, **fields: Any) -> SamplingParams:
    what = directive.Directive(request_id=name, scope="scope", token=TOKEN, **fields)
    extra = {"kv_transfer_params": {directive.PARAM_KEY: msgspec.to_builtins(what)}}
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args=extra)


async def main(model: str) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    llm = AsyncLLM.from_engine_args(arguments(model))
    call = llm.engine_core.call_utility_async
    await call(directive.BIND, TOKEN)
    want = directive.Want(key="entry", tokens=640, expires_at=300.0)
    prompt = {"prompt_token_ids": PROMPT}
    started = False
    async for _ in llm.generate(prompt, params("writer", 40, wants=[want]), "id-1"):
        if not started:
            seen["at_first_token"] = await call(directive.REPORT, "writer")
            started = True
    reader = params("reader", 2, wants=[], read="entry", read_tokens=640)
    async for output in llm.generate(prompt, reader, "id-2"):
        seen["cached_tokens"] = output.num_cached_tokens
    seen["reader"] = await call(directive.REPORT, "reader")
    seen["idle"] = await call(directive.CORE_STATS)
    seen["metrics"] = {
        sample.name: sample.value
        for family in REGISTRY.collect()
        for sample in family.samples
        if sample.name.startswith("vllm:holdfast")
    }
    seen["released"] = await call(directive.RELEASE, ["entry"])
    seen["after"] = await call(directive.CORE_STATS)
    seen["was_reset"] = await llm.reset_prefix_cache()
    llm.shutdown()
    return seen


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(sys.argv[1]))))
