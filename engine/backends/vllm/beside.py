"""Which of vLLM's connectors keep scopes apart when one stands beside ours.

A connector that finds KV by its own keys can hand one scope what another scope wrote. Our connector
and vLLM's block hashes know a scope by `cache_salt`. The salt of our orders has the adapter as
well. The table was read from the source of vLLM 0.33, file by file. This module imports nothing of
vLLM.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.backends.vllm.arguments import MODULE, NAME

FLAG = "ENGINE_VLLM_SHARES_KV_ACROSS_SCOPES"
"""The setting by which an operator accepts the risk. The engine then declares no `isolation`."""
_UNREAD = "it is not known what it finds KV by"


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys by which a connector finds KV."""

    # It never finds what another scope or another adapter wrote.
    is_apart: bool
    # What the keys are made of.
    content: str


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
        False, "tokens without images; only some versions of LMCache's package add the salt"
    ),
    "HF3FSKVConnector": Keys(False, "tokens"),
    "DecodeBenchConnector": Keys(False, "nothing: every prompt is filled with made-up values"),
    "FlexKVConnectorV1": Keys(False, f"all is in FlexKV's own package: {_UNREAD}"),
    "MoRIIOConnector": Keys(False, _UNREAD),
}
"""Keys by the name in `kv_connector`. A connector that is not here was not read."""
SPECS = frozenset({"CPUOffloadingSpec", "TieringOffloadingSpec"})
"""Specs of OffloadingConnector that keep each chunk by the hash that they get, by `spec_name`."""
TIERS = frozenset({"example", "fs", "obj", "p2p"})
"""Tiers below that do so too, by `type`. `kvcr` is not among them: its package was not read."""
OUR_TIERS = f"{MODULE.rpartition('.')[0]}.tiers"


def sharing(transfer: Mapping[str, Any] | None) -> list[str]:
    """What in a `kv_transfer_config` may hand one scope another scope's KV, each with the reason.

    A class of another module may have any name, even ours or MultiConnector's. So a connector that
    names a module of its own counts as unread.
    """
    if transfer is None:
        return []
    name = transfer.get("kv_connector")
    extra = transfer.get("kv_connector_extra_config") or {}
    module = transfer.get("kv_connector_module_path")
    if name == NAME and module in (None, "", MODULE):
        return []
    if module:
        return [f"{name} of {module} ({_UNREAD})"]
    if name == "MultiConnector":
        children = extra.get("connectors") or []
        return [problem for child in children for problem in sharing(child)]
    keys = CONNECTORS.get(str(name), Keys(False, _UNREAD))
    if not keys.is_apart:
        return [f"{name} ({keys.content})"]
    return _unread_parts(extra) if name == "OffloadingConnector" else []


def _unread_parts(extra: Mapping[str, Any]) -> list[str]:
    """The spec and the tiers of an OffloadingConnector that were not read, each with the reason.

    A name of SPECS or TIERS is vLLM's own class, also beside a module: vLLM looks it up first.
    """
    spec = extra.get("spec_name", "CPUOffloadingSpec")
    parts = [] if spec in SPECS else [f"OffloadingConnector's {spec}"]
    for tier in extra.get("secondary_tiers") or ():
        kind = tier.get("type")
        is_ours = tier.get("module_path") == OUR_TIERS
        if kind not in TIERS and not is_ours:
            parts.append(f"OffloadingConnector's tier {kind}")
    return [f"{part} ({_UNREAD})" for part in parts]


def refusal(transfer: Mapping[str, Any] | None) -> str | None:
    """Why this configuration is refused unless FLAG is set. None if it keeps scopes apart."""
    problems = sharing(transfer)
    if not problems:
        return None
    return (
        f"{', '.join(problems)} may give one scope what another scope wrote: leave it out, or set "
        f"{FLAG}=1 to serve without isolation"
    )
