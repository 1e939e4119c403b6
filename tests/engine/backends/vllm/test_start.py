"""Which versions, settings, drafters and layers of vLLM end the start. Some need vLLM itself."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm.arguments import ArgumentRefused, engine_arguments
from engine.backends.vllm.backend import kv_bytes
from engine.backends.vllm.internals import VllmChangedError, check_layers, check_version
from engine.settings import Settings

OURS = {"kv_connector": "HoldfastConnector", "kv_role": "kv_producer"}
BESIDE = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
needs_vllm = pytest.mark.skipif(
    find_spec("vllm") is None, reason="needs vLLM: scripts/long_tests leases"
)
LLAMA = {
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
DEEPSEEK = {**LLAMA, "num_hidden_layers": 61, "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize("version", ["0.29.1", "0.34.0", "1.0", "unknown"])
def test_unknown_versions_are_named(version: str) -> None:
    with pytest.raises(VllmChangedError, match=version):
        check_version(version)


def multi(*children: Any) -> dict[str, Any]:
    extra = {"kv_connector_extra_config": {"connectors": list(children)}}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", **extra}


def settings_with(transfer: Any) -> Settings:
    args = json.dumps({"kv_transfer_config": transfer})
    return Settings.model_validate({"secret": "s" * 16, "vllm_args": args})


@pytest.mark.parametrize("given", [BESIDE, multi(BESIDE), multi(OURS, BESIDE)], ids=repr)
def test_a_connector_that_is_given_stands_beside_ours(given: dict[str, Any]) -> None:
    settings = settings_with(given)
    transfer = engine_arguments(settings, is_cpu=True)["kv_transfer_config"]
    ours, beside = transfer["kv_connector_extra_config"]["connectors"]
    assert (transfer["kv_connector"], beside) == ("MultiConnector", BESIDE)
    assert ours["kv_connector_extra_config"]["lease_share"] == settings.lease_share


@pytest.mark.parametrize(
    "given", ["x", {}, multi("x"), {**multi(), "kv_connector_extra_config": 1}], ids=repr
)
def test_a_connector_without_a_name_is_refused(given: Any) -> None:
    settings = settings_with(given)
    with pytest.raises(ArgumentRefused, match="must name a `kv_connector`"):
        engine_arguments(settings, is_cpu=True)


@needs_vllm
def test_the_version_that_is_installed_is_known() -> None:
    import vllm

    check_version(vllm.__version__)


@needs_vllm
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"lease_share": 1.5}, "lease_share must be between 0 and 1"),
        *(({"drafter": drafter}, "EAGLE or MTP") for drafter in ("eagle", "eagle3", "mtp")),
    ],
    ids=str,
)
def test_settings_that_cannot_be_and_drafters_that_drop_the_last_block_are_refused(
    llama: Path, options: dict[str, Any], message: str
) -> None:
    from tests.engine.backends.vllm.simulator import Simulator

    with pytest.raises(ValueError, match=message):
        Simulator(llama, **options)


@needs_vllm
@pytest.mark.parametrize("drafter", ["ngram", "suffix"])
def test_leases_and_counts_hold_while_tokens_are_proposed(llama: Path, drafter: str) -> None:
    from tests.engine.backends.vllm.simulator import Simulator, tokens_of

    sim, prefix = Simulator(llama, drafter=drafter), tokens_of("prefix", 640)
    sim.add("writer", prefix, wants=[("entry", 640, 300.0)], max_tokens=60)
    while sim.scheduler.has_requests():
        sim.step()
        sim.propose()
    assert sim.num_accepted > 10, "nothing was proposed"
    assert list(sim.states().values()) == ["leased"]
    sim.flood(10)
    report = sim.run("reader", [*prefix, 1, 2], read="entry", max_tokens=40)
    assert report.hit_tokens == 640
    assert sim.losses() == {}
    sim.check_refs()


@pytest.mark.parametrize(
    ("config", "model", "cache", "wanted"),
    [
        (LLAMA, "bfloat16", "auto", 131_072),
        (LLAMA, "bfloat16", "fp8", 65_536),
        (LLAMA, "float32", "bfloat16", 131_072),
        (DEEPSEEK, "bfloat16", "auto", 61 * 576 * 2),
        (DEEPSEEK, "bfloat16", "fp8_e4m3", 61 * 576),
        ({"text_config": DEEPSEEK}, "bfloat16", "auto", 61 * 576 * 2),
        (DEEPSEEK, "bfloat16", "fp8_ds_mla", 0),
        ({**LLAMA, "ssm_state_size": 16}, "bfloat16", "auto", 0),
    ],
)
def test_bytes_of_a_token_follow_the_caches_type_and_the_kind_of_attention(
    config: dict[str, Any], model: str, cache: str, wanted: int
) -> None:
    assert kv_bytes(config, model, cache) == wanted


def group(kind: str, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=type(kind, (), fields)())


def test_layers_that_cannot_be_held_are_refused_by_name_inside_a_group_too() -> None:
    full, kept = group("FullAttentionSpec"), group("MambaSpec", mamba_cache_mode="align")
    check_layers([full, group("SlidingWindowSpec"), kept])
    for odd, why in (
        (group("MambaSpec", mamba_cache_mode="none"), r"MambaSpec .*--mamba-cache-mode align"),
        (group("SlidingWindowMLASpec", bounded_replay=True), "SlidingWindowMLASpec .*again"),
        (group("CircularBufferSpec"), "CircularBufferSpec"),
        (group("SinkFullAttentionSpec"), "SinkFullAttentionSpec"),
    ):
        inner = {"a": full.kv_cache_spec, "b": odd.kv_cache_spec}
        for one in (odd, group("UniformTypeKVCacheSpecs", kv_cache_specs=inner)):
            with pytest.raises(ValueError, match=why):
                check_layers([full, one])
