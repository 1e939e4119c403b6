"""Leases that outlive vLLM's blocks: an engine on vLLM with tiers, a flood, a restart and a kill.

On a GPU vLLM runs with OffloadingConnector and our tier on disk. Elsewhere ExampleConnector stands
in for them. It has no entries, so the tokens that are read after a restart are automatic.
"""

import json
import os
import signal
import time
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

from scripts.stack import ENGINE_SECRET, family, serving_engine

MODULE = "engine.backends.vllm.tiers"
WORDS = 500
"""The words of a prompt. Its entry takes about half of what leases may hold."""
LEASES = 4
PROMPTS = 12
"""The prompts of the flood, which is 3.7 times the pool."""
SETTLE_SECONDS = 5.0
"""The seconds until the marked prompt is surely written. Nothing tells when it is."""


def beside(folder: Path, *, is_gpu: bool) -> dict[str, Any]:
    """vLLM's `kv_transfer_config` with our connector and the one beside it."""
    tier = {"type": "LeaseTier", "module_path": MODULE, "directory": str(folder / "tier")}
    extra = {
        "spec_name": "TieringOffloadingSpec",
        "cpu_bytes_to_use": 2**26,
        "eviction_policy": "LeasedLast",
        "cache_policy_module_path": MODULE,
        "secondary_tiers": [tier | {"max_bytes": 2**30}],
    }
    return {
        "kv_connector": "OffloadingConnector" if is_gpu else "ExampleConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": (
            extra if is_gpu else {"shared_storage_path": str(folder / "files")}
        ),
    }


def ask(url: str, word: str, *, is_marked: bool = True) -> dict[str, int]:
    """What the engine counted of a prompt's input."""
    import httpx

    body: dict[str, Any] = {
        "request_id": uuid4().hex,
        "scope": "0" * 32,
        "prompt": {"text": " ".join(f"{word}{n}" for n in range(WORDS)), "messages": []},
        "sampling": {"max_tokens": 1},
        "breakpoints": [{"segment": 0, "ttl": "1h"}] if is_marked else [],
    }
    headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
    answer = httpx.post(f"{url}/v1/generate", json=body, headers=headers, timeout=300)
    usage: dict[str, int] = json.loads(answer.text.lstrip().partition("\n")[0])["usage"]
    return usage


def tiers() -> Iterator[tuple[str, str]]:
    """Check that leases stay readable. Raise AssertionError if a lease that the tier holds was not
    read."""
    if find_spec("vllm") is None:
        yield "vLLM's tiers", "skipped: no vLLM"
        return
    import torch

    is_gpu = torch.cuda.is_available()
    lease_tokens = 0
    wrong = list[str]()
    with TemporaryDirectory() as name:
        transfer = beside(Path(name), is_gpu=is_gpu)
        for event in ("the flood", "a restart", "kill -9"):
            with serving_engine("vllm", _settings(transfer), Path(name, "log")) as server:
                server.wait()
                if event == "the flood":
                    first_usage = ask(server.url, "first")
                    lease_tokens = ask(server.url, "first")["cache_read_tokens"]
                    yield "written, and read at once", f"{first_usage}; {lease_tokens} tokens"
                    _flood(server.url)
                usage = ask(server.url, "first")
                is_held = is_gpu or event == "the flood"
                if usage["cache_read_tokens"] != lease_tokens and is_held:
                    wrong.append(event)
                result = "{cache_read_tokens} tokens, and {automatic_tokens} automatic"
                yield f"{transfer['kv_connector']}: read after {event}", result.format_map(usage)
                time.sleep(SETTLE_SECONDS)
                if event == "a restart":
                    _kill(family(server.pid))
    assert lease_tokens and not wrong, f"not read after {wrong}"


def _settings(transfer: dict[str, Any]) -> dict[str, str]:
    arguments = {"max_model_len": 4096, "kv_transfer_config": transfer}
    return {
        "ENGINE_NUM_BLOCKS": "256",
        "ENGINE_BLOCK_SIZE": "32",
        "ENGINE_VLLM_ARGS": json.dumps(arguments),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0",
    }


def _flood(url: str) -> None:
    for number in range(LEASES + PROMPTS):
        ask(url, f"other{number}", is_marked=number < LEASES)


def _kill(pids: Iterable[int]) -> None:
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
