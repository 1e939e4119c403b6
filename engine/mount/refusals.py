"""What a vLLM must be for leases in it: checked once, when its server starts.

Each problem ends the start with a message that names the flag to change. vLLM logs and ignores what
a plugin's factory raises; what its hooks raise ends the start.
"""

import os
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

from engine.backends.vllm.names import NAME
from engine.backends.vllm.stat_logger import find_counts

WANTED = f'--kv-transfer-config \'{{"kv_connector":"{NAME}","kv_role":"kv_producer"}}\''
RUST_FRONT_END = "VLLM_USE_RUST_FRONTEND"


class Refused(RuntimeError):
    """This vLLM was started in a way in which leases can't be held. The message says why."""


def check(llm: Any, _args: Namespace) -> None:
    """Raise Refused, naming everything that is wrong."""
    problems = list(_problems(llm))
    if problems:
        raise Refused("holdfast: " + "; ".join(problems))


def _problems(llm: Any) -> Iterator[str]:
    config = llm.vllm_config
    parallel, cache = config.parallel_config, config.cache_config
    if getattr(cache, "kv_offloading_size", None):
        yield "--kv-offloading-size puts its own connector in the place of ours: leave it out"
    elif not _has_connector(config.kv_transfer_config):
        yield f"vLLM has no {NAME}: add {WANTED}"
    if getattr(parallel, "_api_process_count", 1) > 1:
        yield "several API servers would each keep books of their own: --api-server-count 1"
    if parallel.data_parallel_size > 1 and not getattr(
        parallel, "data_parallel_external_lb", False
    ):
        yield (
            "each data-parallel rank would be an engine of its own: start as many servers without "
            "--data-parallel-size and name each of them in HOLDFAST_ENGINES"
        )
    if not cache.enable_prefix_caching:
        yield "prefix caching is off: leave --no-enable-prefix-caching out"
    elif not str(cache.prefix_caching_hash_algo).startswith("sha256"):
        # Other hashes can be made to collide, and then one prompt would read another's blocks.
        yield "--prefix-caching-hash-algo must be sha256 or sha256_cbor"
    if not llm.log_stats:
        yield "--disable-log-stats hides what runs: leave it out"
    elif find_counts(llm) is None:
        yield "VLLM_PLUGINS must name holdfast, so that its stat logger is loaded"
    if config.structured_outputs_config.backend != "guidance":
        yield "our grammars need --structured-outputs-config.backend guidance"
    if os.environ.get(RUST_FRONT_END, "0") not in ("", "0"):
        yield f"the Rust front end has no endpoint plugins: unset {RUST_FRONT_END}"


def _has_connector(transfer: Any) -> bool:
    """Whether ours is the connector, or one of a MultiConnector's."""
    if transfer is None:
        return False
    children = (transfer.kv_connector_extra_config or {}).get("connectors", [])
    names = [transfer.kv_connector, *(child.get("kv_connector") for child in children)]
    return NAME in names
