"""Which of vLLM's connectors keep scopes apart, where one stands beside ours.

A connector that finds KV by its own keys can hand one scope what another wrote. Ours, and vLLM's
block hashes, know a scope by `cache_salt`; the salt of our orders has the adapter as well. The
table is read from the source of vLLM 0.33, file by file. This module imports nothing of vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.backends.vllm.arguments import NAME

FLAG = "ENGINE_VLLM_SHARES_KV_ACROSS_SCOPES"
"""The setting that accepts the risk, and that `isolation` is not declared."""
_UNREAD = "what its keys are of is not known"


@dataclass(frozen=True, slots=True)
class Keys:
    """What a connector finds KV by. `is_apart`: nothing is found for another scope or adapter."""

    is_apart: bool
    what: str


_HASHES = Keys(True, "`request.block_hashes`, which begin with the salt and the adapter")
_NAMED = Keys(True, "no content: a request's own `kv_transfer_params` name what it loads")
_NOTHING = Keys(True, "nothing is loaded into a request")

CONNECTORS: dict[str, Keys] = {
    "OffloadingConnector": _HASHES,
    "SimpleCPUOffloadConnector": _HASHES,
    "MooncakeStoreConnector": _HASHES,
    "NixlConnector": _NAMED,
    "NixlPullConnector": _NAMED,
    "NixlPushConnector": _NAMED,
    "MooncakeConnector": _NAMED,
    "HiSparseConnector": _NOTHING,
    "ExampleHiddenStatesConnector": _NOTHING,
    "ExampleConnector": Keys(False, "tokens and images"),
    "LMCacheConnectorV1": Keys(False, "tokens and images; the salt is not passed on"),
    "LMCacheMPConnector": Keys(
        False, "tokens without images, and the salt in some versions of LMCache's package alone"
    ),
    "HF3FSKVConnector": Keys(False, "tokens"),
    "DecodeBenchConnector": Keys(False, "nothing: every prompt is filled with made-up values"),
    "FlexKVConnectorV1": Keys(False, f"all is in FlexKV's own package: {_UNREAD}"),
    "MoRIIOConnector": Keys(False, _UNREAD),
}
"""By the name in `kv_connector`. One that is not here has not been read."""


def sharing(transfer: Mapping[str, Any] | None) -> list[str]:
    """What in a `kv_transfer_config` may hand a scope another's KV, each with the reason.

    A class of another module may have any name, so one that names a module of its own is not known.
    """
    if transfer is None:
        return []
    name = transfer.get("kv_connector")
    if name == NAME:
        return []
    if name == "MultiConnector":
        extra = transfer.get("kv_connector_extra_config") or {}
        children = extra.get("connectors") or []
        return [problem for child in children for problem in sharing(child)]
    keys = None if transfer.get("kv_connector_module_path") else CONNECTORS.get(str(name))
    keys = keys or Keys(False, _UNREAD)
    return [] if keys.is_apart else [f"{name} ({keys.what})"]


def refusal(transfer: Mapping[str, Any] | None) -> str | None:
    """Why this configuration is refused unless FLAG is set; None where scopes are kept apart."""
    problems = sharing(transfer)
    if not problems:
        return None
    return (
        f"{', '.join(problems)} may give one scope what another wrote: leave it out, or set "
        f"{FLAG}=1 to serve without isolation"
    )
