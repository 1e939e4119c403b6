"""Linear layers: what goes on from a kept state equals transformers' own forward."""

import copy
import random
from collections.abc import Sequence
from dataclasses import replace
from itertools import count

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PretrainedConfig

from engine.cache.ids import BlockId
from engine.cache.recurrent import StateMove
from engine.compute.loading import LoadedModel, prepare_model
from engine.compute.runner import TorchRunner
from engine.schedule.runner import Work
from engine.sizing import kv_size
from tests.engine.compute.tiny import (
    TinyModel,
    new_works,
    random_prompt,
    random_splits,
    relative_difference,
)

BOUND = 1e-5
BLOCK = 8
_MIXED = ["linear_attention", "full_attention", "linear_attention"]
_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
}
_DELTA = {
    "layer_types": _MIXED,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_d_state": 16}
FAMILIES: dict[str, dict[str, object]] = {
    "qwen3_next": _DELTA | _EXPERTS | {"shared_expert_intermediate_size": 32},
    "qwen3_5_text": _DELTA,
    "bamba": _MAMBA | {"attn_layer_indices": [1], "mamba_expand": 2},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "mlp"],
        "mamba_num_heads": 8,
        "mamba_head_dim": 16,
        "n_groups": 1,
        "ssm_state_size": 16,
    },
    "granitemoehybrid": _MAMBA
    | {"layer_types": _MIXED, "num_local_experts": 0, "shared_intermediate_size": 64},
    "falcon_h1": _MAMBA | {"mamba_n_heads": 4, "mamba_d_ssm": 64},
    "lfm2": {"layer_types": ["conv", "full_attention", "conv"]},
    "kimi_linear": _EXPERTS
    | {
        "num_key_value_heads": 4,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "num_experts_per_token": 2,
        "num_shared_experts": 1,
        "layer_types": _MIXED,
        "linear_num_heads": 2,
        "linear_head_dim": 16,
    },
}


def tiny_config(family: str) -> PretrainedConfig:
    config: PretrainedConfig = CONFIG_MAPPING[family](**_SHAPE | FAMILIES[family])
    return config


def tiny_hybrid(family: str) -> TinyModel:
    torch.manual_seed(7)
    config = tiny_config(family)
    plain = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval().float()
    with torch.no_grad():
        for weight in plain.parameters():
            weight.nan_to_num_()  # what transformers leaves uninitialised
    return TinyModel(prepare_model(copy.deepcopy(plain)), plain)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tiny(request: pytest.FixtureRequest) -> TinyModel:
    return tiny_hybrid(request.param)


class Played:
    """One prompt in a runner's blocks. Its state goes from place to place with each step."""

    _numbers = count()

    def __init__(self, loaded: LoadedModel, prompt: Sequence[int], splits: Sequence[int]) -> None:
        number = next(self._numbers) % 4
        self._num_state = loaded.layout.state_blocks(BLOCK)
        self._first = 4 * 20 + number * 8 * self._num_state
        self._places = count()
        self.works = new_works(prompt, splits, range(20 * number, 20 * number + 20))
        self.state: list[BlockId] | None = None

    def next(self) -> Work:
        target = self.place(next(self._places) % 4)
        work = replace(self.works.pop(0), state=StateMove(self.state, target))
        self.state = target
        return work

    def place(self, number: int) -> list[BlockId]:
        first = self._first + number * self._num_state
        return [BlockId(first + index) for index in range(self._num_state)]


def new_runner(loaded: LoadedModel, host_blocks: int = 0) -> TorchRunner:
    return loaded.runner(80 + 4 * 8 * loaded.layout.state_blocks(BLOCK), BLOCK, host_blocks)


def assert_plain(tiny: TinyModel, logits: torch.Tensor, prompt: Sequence[int]) -> None:
    assert relative_difference(logits, tiny.plain_logits(prompt)) <= BOUND


def test_any_chunks_of_any_batch_equal_the_plain_forward(tiny: TinyModel) -> None:
    rng = random.Random(3)
    runner = new_runner(tiny.loaded)
    for _ in range(3):
        prompts = [random_prompt(rng) for _ in range(4)]
        sequences = [
            Played(tiny.loaded, prompt, [*random_splits(rng, len(prompt) - 1), len(prompt) - 1])
            if len(prompt) > 2
            else Played(tiny.loaded, prompt, [1])
            for prompt in prompts
        ]
        rows: dict[int, torch.Tensor] = {}
        while any(sequence.works for sequence in sequences):
            running = [sequence for sequence in sequences if sequence.works and rng.random() < 0.8]
            works = [sequence.next() for sequence in running]
            sampling = [
                sequence for sequence, work in zip(running, works, strict=True) if work.sample
            ]
            if works:
                for sequence, row in zip(sampling, runner.logits(works), strict=True):
                    rows[sequences.index(sequence)] = row
        for index, prompt in enumerate(prompts):
            assert_plain(tiny, rows[index], prompt)


def test_a_kept_state_is_the_same_wherever_it_was(tiny: TinyModel) -> None:
    """Read as it stands, copied, brought back from the host, and from what the store keeps."""
    rng = random.Random(5)
    prompt = random_prompt(rng, 60, 60)
    num_state = tiny.loaded.layout.state_blocks(BLOCK)
    runner = new_runner(tiny.loaded, num_state)
    sequence = Played(tiny.loaded, prompt, [37])
    runner.logits([sequence.next()])
    saved_state = sequence.state
    work = sequence.next()
    assert saved_state is not None
    logits = runner.logits([work])[0]
    assert_plain(tiny, logits, prompt)
    elsewhere = [sequence.place(number) for number in (4, 5, 6)]
    host = [BlockId(index) for index in range(num_state)]
    runner.copy_blocks(list(zip(saved_state, elsewhere[0], strict=True)))
    runner.demote(list(zip(saved_state, host, strict=True)))
    runner.load(list(zip(runner.save(saved_state), elsewhere[2], strict=True)))
    runner.clear_blocks(saved_state)
    runner.promote(list(zip(host, elsewhere[1], strict=True)))
    for state in elsewhere:
        again = replace(work, state=StateMove(state, sequence.place(7)))
        assert torch.equal(runner.logits([again])[0], logits)


def test_the_sizing_knows_what_a_state_takes(tiny: TinyModel) -> None:
    size = kv_size(tiny.plain.config.to_dict(), "float32")
    layout = tiny.loaded.layout
    assert (size.state_bytes, size.bytes_per_token) == (layout.state_bytes, layout.bytes_per_token)
