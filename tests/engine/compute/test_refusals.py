"""Models and arguments that the attention can't do exactly are refused, by name."""

from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    BloomConfig,
    DeepseekV32Config,
    FalconConfig,
    Gemma3Config,
    Gemma3ForCausalLM,
    Gemma3ForConditionalGeneration,
    LlamaConfig,
    MambaConfig,
    PretrainedConfig,
    T5Config,
)

from engine.cache.ids import BlockId
from engine.compute.attention.step import STEP_ARGUMENT, AttentionStep, paged_attention
from engine.compute.batch import build_batch
from engine.compute.errors import ModelRefused
from engine.compute.kv import KvLayout, KvPool
from engine.compute.loading import check_config, layer_windows, load_model, prepare_model
from engine.schedule.runner import Work
from scripts.docs.models import natively, tiny_model
from scripts.stack import ROOT
from tests.engine.compute.tiny import GREEDY, relative_difference

SMALL: dict[str, Any] = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
}
DYNAMIC = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (DeepseekV32Config(), "pick the keys"),
        (MambaConfig(), "state-space"),
        (FalconConfig(alibi=True), "ALiBi"),
        (T5Config(), "encoder|bias"),
        (LlamaConfig(rope_parameters=DYNAMIC), "length: dynamic"),
    ],
)
def test_a_configuration_with_other_mechanisms_is_refused(
    config: PretrainedConfig, reason: str
) -> None:
    with pytest.raises(ModelRefused, match=reason):
        check_config(config)


def test_any_configuration_is_served_or_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    counts: dict[bool, int] = {True: 0, False: 0}
    for make in CONFIG_MAPPING.values():
        try:
            config = make()
        except (OSError, ImportError, ValueError, TypeError, StrictDataclassError):  # no default
            continue
        try:
            check_config(config)
            layer_windows(config.get_text_config(decoder=True))
            counts[True] += 1
        except ModelRefused as refused:
            assert "\n" not in str(refused)
            counts[False] += 1
    assert min(counts.values()) > 150


def test_of_a_model_that_sees_the_text_decoder_is_served(tmp_path: Path) -> None:
    vision = {**SMALL, "num_hidden_layers": 1, "image_size": 28, "patch_size": 14}
    config = Gemma3Config(
        text_config={**SMALL, "pad_token_id": 0, "sliding_window": 16}, vision_config=vision
    )
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    loaded = load_model(str(tmp_path))
    assert type(loaded.model) is Gemma3ForCausalLM
    prompt = list(range(5, 45))
    table = [BlockId(3), BlockId(1), BlockId(0)]
    work = Work(token_ids=prompt, start=0, block_table=table, sample=GREEDY)
    logits = loaded.runner(4, 16).logits([work])[0]
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([prompt])).logits[0, -1]
    assert relative_difference(logits, expected) <= 1e-5


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        pytest.param(
            BloomConfig(vocab_size=99, hidden_size=32, n_layer=1),
            "BloomForCausalLM",
            id="without-attention-backends",
        ),
    ],
)
def test_a_class_with_other_attention_is_refused(config: PretrainedConfig, reason: str) -> None:
    with pytest.raises(ModelRefused, match=reason):
        prepare_model(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize(
    "argument",
    [
        {"position_bias": torch.ones(1)},
        {"dropout": 0.1},
        {"is_causal": False},
        {"sliding_window": 7},
        {"something_new": 1},
    ],
    ids=lambda argument: next(iter(argument)),
)
def test_an_argument_that_is_not_implemented_raises(argument: dict[str, Any]) -> None:
    layout = KvLayout(num_layers=1, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    pool = KvPool(layout, 2, 4, torch.device("cpu"))
    work = Work(token_ids=[1, 2], start=0, block_table=[BlockId(1)])
    batch = build_batch([work], 4, torch.device("cpu"))
    step = AttentionStep(pool=pool, batch=batch, windows=[None])
    module = torch.nn.Module()
    module.layer_idx = 0  # type: ignore[assignment]
    query = torch.ones(1, 4, 2, 8)
    key = torch.ones(1, 2, 2, 8)
    arguments = {STEP_ARGUMENT: step, "scaling": 1.0}
    output, _ = paged_attention(module, query, key, key, None, **arguments)
    assert output.shape == (1, 2, 4, 8)
    with pytest.raises(ModelRefused):
        paged_attention(module, query, key, key, None, **arguments, **argument)


def test_half_precision_passes_the_check_at_load() -> None:
    model = AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).to(torch.bfloat16)
    assert prepare_model(model).layout.bytes_per_token == 2 * 2 * 2 * 8 * 2


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """Those of a model in `tmp_path`."""
    AutoModelForCausalLM.from_config(LlamaConfig(**SMALL)).save_pretrained(tmp_path)
    return tmp_path / "model.safetensors"


def test_a_directory_loads_and_reports_its_progress(weights: Path) -> None:
    stages: list[tuple[str, float]] = []
    loaded = load_model(str(weights.parent), progress=lambda *stage: stages.append(stage))
    assert loaded.max_context_tokens == 64
    assert loaded.windows == [None, None]
    assert [fraction for _, fraction in stages] == sorted(fraction for _, fraction in stages)
    assert stages[-1] == ("ready", 1.0)


def remove_config(weights: Path) -> None:
    (weights.parent / "config.json").unlink()


def rename(weights: Path) -> None:
    weights.rename(weights.with_name("pytorch_model.bin"))


def cut_off(weights: Path) -> None:
    weights.write_bytes(weights.read_bytes()[:-64])


def drop_a_layer(weights: Path) -> None:
    tensors = {
        name: tensor for name, tensor in load_file(weights).items() if "layers.1" not in name
    }
    save_file(tensors, weights, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("hurt", "reason"),
    [
        (remove_config, "can't be loaded"),
        (rename, "no safetensors"),
        (cut_off, r"damaged safetensors file.*cut off"),
        (drop_a_layer, r"no weights for model\.layers\.1.*missing in all"),
    ],
)
def test_a_directory_that_is_not_whole_is_refused_in_one_line(
    weights: Path, hurt: Any, reason: str
) -> None:
    hurt(weights)
    with pytest.raises(ModelRefused, match=reason) as refused:
        load_model(str(weights.parent))
    assert str(weights.parent) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "architecture", ["llama", "deepseek_v3", "deepseek_v32", "falcon", "kimi_linear", "lfm2"]
)
def test_the_table_of_models_says_what_the_check_says(architecture: str) -> None:
    table = (ROOT / "engine" / "MODELS.md").read_text("utf-8").splitlines()
    (row,) = [line for line in table if line.startswith("| ") and f"`{architecture}`" in line]
    assert row.split(" | ")[1] == natively(tiny_model(architecture), "sdpa")
