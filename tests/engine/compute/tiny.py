"""Tiny random models whose logits are large enough that a wrong attention shows."""

import copy
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Gemma2Config,
    Gemma4TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MiMoV2FlashConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen3Config,
)

from engine.cache.ids import BlockId
from engine.compute.loading import Attention, LoadedModel, prepare_model
from engine.compute.runner import TorchRunner
from engine.schedule.runner import SampleParams, Work

VOCABULARY = 199
WINDOW = 24
_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
_LATENTS = {
    "num_key_value_heads": 8,
    "q_lora_rank": None,
    "kv_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "first_k_dense_replace": 3,
}
_CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_SHAPE),
    "qwen3": lambda: Qwen3Config(**_SHAPE, head_dim=16),
    # Keys that turn in pairs, half of their numbers.
    "glm4": lambda: Glm4Config(**_SHAPE, head_dim=16, pad_token_id=0),
    "mistral": lambda: MistralConfig(**_SHAPE, sliding_window=WINDOW),
    "gemma2": lambda: Gemma2Config(
        **_SHAPE,
        head_dim=16,
        query_pre_attn_scalar=16,
        sliding_window=WINDOW,
        attn_logit_softcapping=2.0,
    ),
    # Sinks; latents; values narrower than keys, and layers with twice the heads; layers that attend
    # to an earlier one's keys and values, with wider heads in some.
    "gpt_oss": lambda: GptOssConfig(
        **_SHAPE, head_dim=16, sliding_window=WINDOW, num_local_experts=2, num_experts_per_tok=1
    ),
    "deepseek_v3": lambda: DeepseekV3Config(**_SHAPE | _LATENTS),
    "mimo_v2": lambda: MiMoV2FlashConfig(
        **_SHAPE,
        head_dim=16,
        v_head_dim=12,
        sliding_window=WINDOW,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
        mlp_layer_types=["dense"] * 3,
    ),
    "gemma4": lambda: Gemma4TextConfig(
        **_SHAPE | {"num_hidden_layers": 4},
        head_dim=16,
        global_head_dim=32,
        num_global_key_value_heads=1,
        sliding_window=WINDOW,
        num_kv_shared_layers=2,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """The same weights twice: with our attention, and as transformers computes them."""

    loaded: LoadedModel
    plain: PreTrainedModel
    num_blocks: int = 64
    block_size: int = 8

    def runner(self) -> TorchRunner:
        return self.loaded.runner(self.num_blocks, self.block_size)

    def plain_logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """After the last token, computed in one go without a cache."""
        with torch.inference_mode():
            output = self.plain(torch.tensor([list(token_ids)]), use_cache=False)
        logits: torch.Tensor = output.logits[0, -1]
        return logits

    def with_plain_setting(self, **settings: object) -> "TinyModel":
        """The reference computed with another configuration of the same weights."""
        config = copy.deepcopy(self.plain.config)
        for name, value in settings.items():
            setattr(config, name, value)
        other = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
        other.load_state_dict(self.plain.state_dict())
        return replace(self, plain=other)


GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)


def new_works(token_ids: Sequence[int], splits: Sequence[int], table: Sequence[int]) -> list[Work]:
    """One prompt in chunks that begin at `splits` (0 is added); the last one samples."""
    borders = [0, *splits, len(token_ids)]
    return [
        Work(
            token_ids=token_ids[begin:end],
            start=begin,
            block_table=[BlockId(block) for block in table],
            sample=GREEDY if end == len(token_ids) else None,
        )
        for begin, end in pairwise(borders)
    ]


def run_in_turn(runner: TorchRunner, works: Sequence[Work]) -> torch.Tensor:
    """One step per work; the logits of the last."""
    logits = torch.empty(0)
    for work in works:
        logits = runner.logits([work])
    return logits[0]


def random_prompt(rng: random.Random, shortest: int = 2, longest: int = 150) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(rng.randint(shortest, longest))]


def random_splits(rng: random.Random, length: int) -> list[int]:
    return sorted(rng.sample(range(1, length), rng.randint(0, min(6, length - 1))))


def relative_difference(logits: torch.Tensor, expected: torch.Tensor) -> float:
    return float((logits - expected).abs().max() / expected.abs().max())


def new_tiny_model(family: str, attention: Attention = "auto") -> TinyModel:
    torch.manual_seed(7)
    config = _CONFIGS[family]()
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            if "sinks" in name:
                weight.normal_()
            elif "norm" not in name:
                weight.mul_(5)
    return TinyModel(prepare_model(copy.deepcopy(plain), attention), plain)
