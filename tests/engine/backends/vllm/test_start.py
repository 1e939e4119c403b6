"""Which versions, settings, drafters and layers of vLLM end the start. Some need vLLM itself."""

import inspect
import json
import re
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.backends.vllm.arguments import MODULE, ArgumentRefused, engine_arguments
from engine.backends.vllm.backend import kv_bytes
from engine.backends.vllm.beside import CONNECTORS, FLAG, OUR_TIERS, SPECS, TIERS, refusal
from engine.backends.vllm.internals import (
    VllmChangedError,
    check_adapters,
    check_layers,
    check_version,
)
from engine.backends.vllm.names import NAMES, check_names, signatures_of
from engine.settings import Settings

BLOCK_POOL = "v1.core.block_pool:BlockPool"
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


@pytest.mark.parametrize("version", ["0.29.1", "0.9", "unknown"])
def test_versions_that_are_too_old_are_named(version: str) -> None:
    with pytest.raises(VllmChangedError, match=version):
        check_version(version)


def multi(*children: Any) -> dict[str, Any]:
    extra = {"kv_connector_extra_config": {"connectors": list(children)}}
    return {"kv_connector": "MultiConnector", "kv_role": "kv_both", **extra}


def settings_with(transfer: Any) -> Settings:
    args = json.dumps({"kv_transfer_config": transfer})
    return Settings.model_validate({"secret": "s" * 16, "vllm_args": args})


@pytest.mark.parametrize("options", [BESIDE, multi(BESIDE), multi(OURS, BESIDE)], ids=repr)
def test_a_connector_that_is_given_stands_beside_ours(options: dict[str, Any]) -> None:
    settings = settings_with(options)
    transfer = engine_arguments(settings, is_cpu=True)["kv_transfer_config"]
    ours, beside = transfer["kv_connector_extra_config"]["connectors"]
    assert (transfer["kv_connector"], beside) == ("MultiConnector", BESIDE)
    assert ours["kv_connector_extra_config"]["lease_share"] == settings.lease_share


@pytest.mark.parametrize(
    "options", ["x", {}, multi("x"), {**multi(), "kv_connector_extra_config": 1}], ids=repr
)
def test_a_connector_without_a_name_is_refused(options: Any) -> None:
    settings = settings_with(options)
    with pytest.raises(ArgumentRefused, match="must name a `kv_connector`"):
        engine_arguments(settings, is_cpu=True)


@needs_vllm
@pytest.mark.parametrize("part", NAMES)
def test_every_name_of_the_vllm_that_is_installed_is_as_it_was_read(part: str) -> None:
    check_names(part)


@needs_vllm
def test_a_changed_name_switches_us_off_before_vllm_serves_and_vllm_goes_on(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.core.block_pool import BlockPool

    from engine.backends.vllm.switch import SwitchedOff
    from tests.engine.backends.vllm.simulator import Simulator, tokens_of

    touch = BlockPool.touch
    monkeypatch.setattr(BlockPool, "touch", lambda self, blocks, why=None: touch(self, blocks))
    message = r"BlockPool\.touch \(now \(self, blocks, why=\)\)"
    with pytest.raises(VllmChangedError, match=message):
        check_names("scheduler")
    sim = Simulator(llama, is_bound=False, is_off=True)
    assert sim.switch.reason is not None and "BlockPool.touch" in sim.switch.reason
    sim.run_foreign("theirs", tokens_of("theirs", 400))
    with pytest.raises(SwitchedOff, match="touch"):
        sim.call("bind", "token")


@needs_vllm
@pytest.mark.parametrize(
    ("name", "label"),
    [("blocks", "BlockPool.blocks (gone)"), ("touch", "BlockPool.touch (gone)")],
)
def test_a_name_that_is_gone_is_told(
    monkeypatch: pytest.MonkeyPatch, name: str, label: str
) -> None:
    """The renamed class has it by another name: a later vLLM's."""
    import vllm.v1.core.block_pool as module

    source = inspect.getsource(module.BlockPool)
    renamed = source.replace(f"self.{name}", "self.other").replace(f"def {name}(", "def other(")
    scope = dict(vars(module))
    exec(compile(renamed, module.__file__ or "", "exec"), scope)
    monkeypatch.setattr(module, "BlockPool", scope["BlockPool"])
    # `getsource` reads the file, which has the old text.
    monkeypatch.setattr("engine.backends.vllm.names.inspect.getsource", lambda _kind: renamed)
    signatures = signatures_of("scheduler")
    assert signatures[label.removesuffix(" (gone)").replace("BlockPool", BLOCK_POOL)] is None


APART = ["OffloadingConnector", "NixlConnector", "MooncakeStoreConnector"]
SHARING = [
    "ExampleConnector",
    "LMCacheConnectorV1",
    "LMCacheMPConnector",
    "HF3FSKVConnector",
    "FlexKVConnectorV1",
]


def child(name: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": "kv_both", **more}


@pytest.mark.parametrize("name", [*SHARING, "SomebodysConnector"])
def test_a_connector_that_may_give_a_scope_anothers_content_is_refused_by_name(name: str) -> None:
    for transfer in (child(name), multi(OURS, child(name)), multi(multi(OURS, child(name)))):
        why = refusal(transfer)
        assert why is not None and name in why and f"{FLAG}=1" in why


@pytest.mark.parametrize("name", APART)
def test_connectors_that_know_the_salt_or_no_content_may_stand_beside_ours(name: str) -> None:
    assert refusal(multi(OURS, child(name))) is None
    # A class of another module may have any name.
    connector = child(name, kv_connector_module_path="somebodys.module")
    assert refusal(multi(OURS, connector)) is not None


@pytest.mark.parametrize("name", ["HoldfastConnector", "MultiConnector"])
def test_a_class_of_another_module_is_not_taken_for_ours(name: str) -> None:
    connector = child(name, kv_connector_module_path="somebodys.module")
    for transfer in (connector, multi(OURS, connector)):
        why = refusal(transfer)
        assert why is not None and "somebodys.module" in why
    assert refusal(child("HoldfastConnector", kv_connector_module_path=MODULE)) is None


@pytest.mark.parametrize(
    ("extra", "unread"),
    [
        ({}, None),
        ({"spec_name": "CPUOffloadingSpec", "spec_module_path": "is.not.loaded"}, None),
        ({"spec_name": "Theirs", "spec_module_path": "somebodys"}, "Theirs"),
        (
            {"secondary_tiers": [{"type": "fs"}, {"type": "LeaseTier", "module_path": OUR_TIERS}]},
            None,
        ),
        ({"secondary_tiers": [{"type": "fs"}, {"type": "Theirs", "module_path": "m"}]}, "Theirs"),
        ({"secondary_tiers": [{"type": "LeaseTier", "module_path": "somebodys"}]}, "LeaseTier"),
        ({"secondary_tiers": [{"type": "kvcr"}]}, "kvcr"),
    ],
    ids=str,
)
def test_what_offloading_loads_of_other_modules_is_not_known(
    extra: dict[str, Any], unread: str | None
) -> None:
    offloading = child("OffloadingConnector", kv_connector_extra_config=extra)
    why = refusal(multi(OURS, offloading))
    if unread is None:
        assert why is None
    else:
        assert why is not None and unread in why


@needs_vllm
def test_each_spec_and_tier_of_vllm_is_known_or_said_to_be_unread() -> None:
    from vllm.v1.kv_offload.factory import OffloadingSpecFactory
    from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory

    assert set(OffloadingSpecFactory._registry) == SPECS
    assert set(SecondaryTierFactory._registry) - {"kvcr"} == TIERS


@needs_vllm
def test_each_connector_that_vllm_has_is_in_the_table() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    known = {*CONNECTORS, "MultiConnector", "HoldfastConnector"}
    assert set(KVConnectorFactory._registry) <= known


@needs_vllm
def test_what_the_table_says_of_example_connector_is_so(tmp_path: Path, llama: Path) -> None:
    """Its key for one prompt is the same for two scopes, and vLLM's block hashes differ."""
    import torch

    from tests.engine.backends.vllm.simulator import Simulator, tokens_of

    extra = {"kv_connector_extra_config": {"shared_storage_path": str(tmp_path)}}
    sim = Simulator(llama, beside=child("ExampleConnector", **extra))
    example = sim.scheduler.get_kv_connector().sub_connectors[1]
    prompt = tokens_of("prompt", 320)
    first, second = (sim.make_request(scope, prompt, scope=scope) for scope in ("a", "b"))
    assert list(first.block_hashes) != list(second.block_hashes)
    matched = []
    for request in (first, second):
        matched.append(example.get_num_new_matched_tokens(request, 0)[0])
        aligned = torch.tensor(prompt)[: (len(prompt) - 1) // 16 * 16]
        example._generate_foldername_debug(aligned, [], create_folder=True)
    assert matched == [0, 304]


@pytest.mark.parametrize(
    ("version", "is_cpu", "is_refused"),
    [
        ("0.32.0", True, True),
        ("0.32.0+cpu", True, True),
        ("0.33.0+cpu", True, False),
        ("0.32.0", False, False),
        ("0.31.0", False, True),
    ],
)
def test_adapters_are_refused_where_other_rows_would_be_computed_by_them(
    version: str, is_cpu: bool, is_refused: bool
) -> None:
    if not is_refused:
        check_adapters(version, is_cpu=is_cpu)
        return
    with pytest.raises(VllmChangedError, match=re.escape(version)):
        check_adapters(version, is_cpu=is_cpu)


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

    sim = Simulator(llama, drafter=drafter)
    prefix = tokens_of("prefix", 640)
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
    ("config", "model", "cache", "num_bytes"),
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
    config: dict[str, Any], model: str, cache: str, num_bytes: int
) -> None:
    assert kv_bytes(config, model, cache) == num_bytes


def group(kind: str, **fields: object) -> SimpleNamespace:
    return SimpleNamespace(layer_names=["layers.0"], kv_cache_spec=type(kind, (), fields)())


def test_layers_that_cannot_be_held_are_refused_by_name_inside_a_group_too() -> None:
    full = group("FullAttentionSpec")
    stateful = group("MambaSpec", mamba_cache_mode="align")
    check_layers([full, group("SlidingWindowSpec"), stateful])
    for odd, why in (
        (group("MambaSpec", mamba_cache_mode="none"), r"MambaSpec .*--mamba-cache-mode align"),
        (group("SlidingWindowMLASpec", bounded_replay=True), "SlidingWindowMLASpec .*again"),
        (group("CircularBufferSpec"), "CircularBufferSpec"),
        (group("SinkFullAttentionSpec"), "SinkFullAttentionSpec"),
    ):
        inner = {"a": full.kv_cache_spec, "b": odd.kv_cache_spec}
        for spec in (odd, group("UniformTypeKVCacheSpecs", kv_cache_specs=inner)):
            with pytest.raises(ValueError, match=why):
                check_layers([full, spec])
