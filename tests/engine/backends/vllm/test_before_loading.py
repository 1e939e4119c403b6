"""What is refused before the model loads, by vLLM's own configuration of a server."""

import json
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm", reason="needs vLLM: scripts/long_tests leases")

from vllm.engine.arg_utils import AsyncEngineArgs

from engine.backends.vllm.beside import FLAG
from engine.mount import plugin
from tests.engine.backends.vllm.simulator import transfer_config

OURS = transfer_config()
MULTI = {"kv_connector": "MultiConnector", "kv_role": "kv_both"}
EXAMPLE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}
GUIDANCE = {"backend": "guidance"}
DEEPSEEK = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "n_routed_experts": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
}


def multi(*connectors: dict[str, Any]) -> dict[str, Any]:
    return MULTI | {"kv_connector_extra_config": {"connectors": list(connectors)}}


@pytest.fixture(autouse=True)
def checked(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a server's process whose VLLM_PLUGINS names us."""
    # Put back afterwards: `register` sets it anew.
    monkeypatch.setattr(
        AsyncEngineArgs, "create_engine_config", AsyncEngineArgs.create_engine_config
    )
    monkeypatch.setenv("VLLM_PLUGINS", "holdfast")
    monkeypatch.setenv("ENGINE_SECRET", "secret-of-the-tests")
    plugin.register()


def configured(model: Path, **changes: Any) -> Any:
    arguments: dict[str, Any] = {
        "model": str(model),
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "enforce_eager": True,
        "block_size": 32,
        "max_model_len": 2048,
        "kv_transfer_config": OURS,
        "structured_outputs_config": GUIDANCE,
    }
    return AsyncEngineArgs(**arguments | changes).create_engine_config()


def test_what_can_be_served_is(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert configured(llama).model_config.max_model_len == 2048
    monkeypatch.setenv("VLLM_PLUGINS", "others")
    assert configured(llama, kv_transfer_config=None).kv_transfer_config is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_transfer_config": None}, "vLLM has no HoldfastConnector: add --kv-transfer-config"),
        ({"kv_transfer_config": multi(EXAMPLE)}, "the MultiConnector has no HoldfastConnector"),
        ({"kv_transfer_config": multi(OURS, EXAMPLE)}, f"ExampleConnector.*{FLAG}=1"),
        ({"kv_transfer_config": OURS | {"kv_role": "kv_consumer"}}, "must be kv_producer"),
        (
            {"kv_transfer_config": OURS | {"kv_connector_extra_config": {"leaseshare": 0.5}}},
            "`leaseshare` is no setting of HoldfastConnector: did you mean `lease_share`",
        ),
        (
            {"kv_transfer_config": OURS | {"kv_connector_extra_config": {"lease_share": "half"}}},
            "lease_share must be a number between 0 and 1",
        ),
        ({"runner": "pooling", "kv_transfer_config": None}, "--runner pooling generates nothing"),
        ({"enable_prefix_caching": False}, "leave --no-enable-prefix-caching out"),
        ({"prefix_caching_hash_algo": "xxhash"}, "sha256 or sha256_cbor"),
        ({"structured_outputs_config": {"backend": "auto"}}, "backend guidance"),
        ({"disable_log_stats": True}, "--disable-log-stats"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_can_not_be_served_ends_the_start_in_one_line(
    llama: Path, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(SystemExit, match=words) as ended:
        configured(llama, **changes)
    assert str(ended.value).startswith("holdfast: ")
    assert "\n" not in str(ended.value)


def test_a_risk_that_was_accepted_is_no_reason(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FLAG, "1")
    config = configured(llama, kv_transfer_config=multi(OURS, EXAMPLE))
    assert config.kv_transfer_config.kv_connector == "MultiConnector"


def test_latent_attention_on_a_cpu_is_told_by_its_own_cause(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(DEEPSEEK), "utf-8")
    with pytest.raises(SystemExit, match=r"latent attention \(MLA\) on a CPU"):
        configured(tmp_path)


def test_a_wrong_setting_of_ours_is_named(llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ENGINE_SECRET", "short")
    with pytest.raises(SystemExit, match="ENGINE_SECRET"):
        configured(llama)


def test_a_check_that_fails_by_itself_is_left_to_the_one_behind_the_load(
    llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as in a vLLM whose configuration has other fields."""

    def fail(*_: Any) -> bool:
        raise AttributeError

    monkeypatch.setattr("engine.mount.checks.is_known", fail)
    assert configured(llama, kv_transfer_config=None) is not None
    monkeypatch.setattr("engine.mount.checks.is_known", lambda _: False)
    assert configured(llama, kv_transfer_config=None) is not None
