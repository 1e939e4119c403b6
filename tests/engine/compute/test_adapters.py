"""LoRA and activated LoRA against PEFT's own forward, in float32, and what is refused."""

import copy
import json
import math
import random
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.cache.digests import ChainKind
from engine.compute.adapters import Adapter, load_adapter
from engine.compute.runner import TorchRunner
from engine.refusal import StartRefused
from engine.schedule.runner import Work
from tests.adapters import write_adapter
from tests.engine.compute.test_hybrids import Played, new_runner, tiny_hybrid
from tests.engine.compute.tiny import (
    VOCABULARY,
    TinyModel,
    new_works,
    random_prompt,
    random_splits,
    relative_difference,
    run_in_turn,
)

BOUND = 1e-5
INVOCATION = [5, 6, 7]
Models = Callable[[str], TinyModel]
PATTERNS = {"rank_pattern": {"q_proj": 3}, "alpha_pattern": {"layers.1.self_attn.o_proj": 30}}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
    "all-linear": {"r": 2, "lora_alpha": 8, "target_modules": "all-linear"},
    "rslora": {"r": 8, "lora_alpha": 8, "use_rslora": True, "target_modules": ["o_proj"]},
    "patterns": {"r": 4, "lora_alpha": 9, "target_modules": ["q_proj", "o_proj"], **PATTERNS},
    "one layer": {"target_modules": ["k_proj", "o_proj"], "layers_to_transform": [1]},
}
"""By PEFT's own names of fields."""


def trained(
    model: TinyModel, directory: Path, seed: int = 1, **config: Any
) -> Callable[[Sequence[int]], torch.Tensor]:
    """Write an adapter with random weights, and give the logits that PEFT's forward has with it."""
    config["targets"] = config.pop("target_modules")
    peft = write_adapter(copy.deepcopy(model.plain), directory, seed, std=0.2, **config)

    def logits(token_ids: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode():
            output = peft(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
        last: torch.Tensor = output.logits[0, -1]
        return last

    return logits


def with_adapter(works: Sequence[Work], adapter: Adapter, start: int = 0) -> list[Work]:
    use = ChainKind(adapter.digest, start)
    return [replace(work, adapter=use) for work in works]


def runner_with(model: TinyModel, *directories: Path) -> TorchRunner:
    runner = model.runner()
    for directory in directories:
        runner.adapters.attach(runner.adapters.read(directory).digest)
    return runner


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "deepseek_v3"])
def test_an_adapter_computes_what_peft_does(
    both_attentions: Models, tmp_path: Path, family: str, name: str
) -> None:
    model = both_attentions(family)
    rng = random.Random(3)
    config = dict(CONFIGS[name])
    if family == "deepseek_v3":  # its keys and values come from latents
        if name in ("all-linear", "one layer"):
            pytest.skip("its layers between latents and keys are refused")
        config["target_modules"] = ["q_proj", "o_proj"]
    expected = trained(model, tmp_path, **config)
    adapter = load_adapter(tmp_path, model.loaded.model)
    runner = runner_with(model, tmp_path)
    for _ in range(4):
        prompt = random_prompt(rng)
        works = new_works(prompt, random_splits(rng, len(prompt)), range(20))
        logits = run_in_turn(runner, with_adapter(works, adapter))
        assert relative_difference(logits, expected(prompt)) <= BOUND
        # And it does something.
        assert relative_difference(logits, model.plain_logits(prompt)) > 100 * BOUND


def test_an_activated_adapter_computes_what_peft_does(
    both_attentions: Models, tmp_path: Path
) -> None:
    model = both_attentions("llama")
    rng = random.Random(4)
    expected = trained(
        model, tmp_path, target_modules=["q_proj", "v_proj"], alora_invocation_tokens=INVOCATION
    )
    adapter = load_adapter(tmp_path, model.loaded.model)
    assert adapter.invocation == INVOCATION
    runner = runner_with(model, tmp_path)
    for _ in range(6):
        head = random_prompt(rng, 20, 60)
        tail = random_prompt(rng, 1, 20)
        prompt = [token for token in head if token != INVOCATION[0]]
        start = len(prompt)
        prompt += INVOCATION + [token for token in tail if token != INVOCATION[0]]
        works = new_works(prompt, random_splits(rng, len(prompt)), range(20))
        logits = run_in_turn(runner, with_adapter(works, adapter, start))
        assert relative_difference(logits, expected(prompt)) <= BOUND
        assert relative_difference(logits, model.plain_logits(prompt)) > 100 * BOUND


def test_what_the_base_computed_in_front_of_an_invocation_is_the_adapters_to_the_bit(
    both_attentions: Models, tmp_path: Path
) -> None:
    model = both_attentions("llama")
    config = {"target_modules": ["q_proj", "v_proj"], "alora_invocation_tokens": INVOCATION}
    trained(model, tmp_path, **config)
    adapter = load_adapter(tmp_path, model.loaded.model)
    prompt = [*range(20, 60), *INVOCATION, *range(80, 100)]
    first, *second_half = new_works(prompt, [40, 50], range(20))
    adapter_runner = runner_with(model, tmp_path)
    alone = run_in_turn(adapter_runner, with_adapter([first, *second_half], adapter, 40))
    shared = runner_with(model, tmp_path)
    base = [first, *new_works(prompt, [40, 50], [*range(5), *range(30, 45)])[1:]]
    plain = run_in_turn(shared, base)
    assert torch.equal(run_in_turn(shared, with_adapter(second_half, adapter, 40)), alone)
    assert not torch.equal(plain, alone)
    # And back: the base goes on from what the adapter's turn wrote before its invocation.
    assert torch.equal(run_in_turn(adapter_runner, base[1:]), plain)


def test_rows_of_a_step_have_their_own_adapters(both_attentions: Models, tmp_path: Path) -> None:
    model = both_attentions("llama")
    rng = random.Random(5)
    prompts = list[list[int]]()
    expected = [model.plain_logits]
    adapters = list[Adapter]()
    for number in (1, 2):
        directory = tmp_path / str(number)
        expected.append(trained(model, directory, number, target_modules="all-linear"))
        adapters.append(load_adapter(directory, model.loaded.model))
    assert adapters[0].digest != adapters[1].digest
    runner = runner_with(model, tmp_path / "1", tmp_path / "2")
    last = list[Work]()
    for place in range(6):
        prompts.append(random_prompt(rng, 20, 50))
        splits = [len(prompts[-1]) - 1] if place % 2 else [10]
        works = new_works(prompts[-1], splits, range(8 * place, 8 * place + 8))
        if place % 3:
            works = with_adapter(works, adapters[place % 3 - 1])
        runner.logits(works[:1])
        last.append(works[-1])
    rows = runner.logits(last)
    for place, (row, prompt) in enumerate(zip(rows, prompts, strict=True)):
        assert relative_difference(row, expected[place % 3](prompt)) <= BOUND
    base = [work for work in last if work.adapter is None]
    again = runner.logits(base)
    assert all(not module._forward_hooks for module in model.loaded.model.modules())
    for row, prompt in zip(again, [prompts[0], prompts[3]], strict=True):
        assert relative_difference(row, model.plain_logits(prompt)) <= BOUND


def test_a_digest_is_of_the_weights_the_scale_and_the_invocation_alone(
    tiny_models: Models, tmp_path: Path
) -> None:
    model = tiny_models("llama")
    trained(model, tmp_path / "a", target_modules=["q_proj"], r=4)
    first = load_adapter(tmp_path / "a", model.loaded.model).digest
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    path = tmp_path / "b" / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps({**config, "lora_dropout": 0.5, "peft_version": "9"}))
    assert load_adapter(tmp_path / "b", model.loaded.model).digest == first
    path.write_text(json.dumps({**config, "alora_invocation_tokens": INVOCATION}))
    assert load_adapter(tmp_path / "b", model.loaded.model).digest != first
    path.write_text(json.dumps({**config, "lora_alpha": 9}))
    assert load_adapter(tmp_path / "b", model.loaded.model).digest != first
    path.write_text(json.dumps(config))
    weights = load_file(tmp_path / "b" / "adapter_model.safetensors")
    next(iter(weights.values()))[0, 0] += 1e-3
    save_file(weights, tmp_path / "b" / "adapter_model.safetensors")
    assert load_adapter(tmp_path / "b", model.loaded.model).digest != first


@pytest.mark.parametrize(
    "config",
    [
        {"use_dora": True},
        {"bias": "lora_only"},
        {"modules_to_save": ["lm_head"]},
        {"target_parameters": ["mlp.experts.gate_up_proj"]},
        {"trainable_token_indices": [1, 2]},
        {"layer_replication": [[0, 1]]},
        {"init_lora_weights": "pissa"},
        {"peft_type": "IA3"},
        {"lora_bias": True},
        {"some_field_of_tomorrow": 1},
        {"alora_invocation_tokens": [VOCABULARY]},
        {"alora_invocation_tokens": "5 6"},
        {"r": 10_000},
        {"lora_alpha": "16"},
        {"lora_alpha": math.nan},
        {"alpha_pattern": ["q_proj"]},
        {"rank_pattern": {"(": 3}},
        {"rank_pattern": {"(.*|.*|.*)*(.*)*(.*)*(.*)*X": 3}},
        {"alpha_pattern": {r"([a-z._\d]+)+!": 3}},
    ],
)
def test_what_can_not_be_computed_exactly_is_refused_by_name(
    tiny_models: Models, tmp_path: Path, config: dict[str, Any]
) -> None:
    model = tiny_models("llama")
    trained(model, tmp_path, target_modules=["q_proj"])
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    with pytest.raises(StartRefused, match=f"`{next(iter(config))}`"):
        load_adapter(tmp_path, model.loaded.model)


def test_layers_whose_rows_are_no_tokens_are_refused_by_name(tmp_path: Path) -> None:
    hybrid = tiny_hybrid("qwen3_next")
    trained(hybrid, tmp_path / "linear", target_modules=["in_proj_qkvz"])
    with pytest.raises(StartRefused, match=r"in_proj_qkvz`: .* recurrent"):
        load_adapter(tmp_path / "linear", hybrid.loaded.model)
    trained(hybrid, tmp_path / "head", target_modules=["lm_head"])
    with pytest.raises(StartRefused, match=r"lm_head`: .* head"):
        load_adapter(tmp_path / "head", hybrid.loaded.model)


def test_the_attention_layers_of_a_hybrid_compute_what_peft_does(tmp_path: Path) -> None:
    hybrid = tiny_hybrid("qwen3_next")
    expected = trained(hybrid, tmp_path, target_modules=["q_proj", "o_proj"])
    adapter = load_adapter(tmp_path, hybrid.loaded.model)
    runner = new_runner(hybrid.loaded)
    prompt = [*range(20, 70)]
    runner.adapters.attach(runner.adapters.read(tmp_path).digest)
    played = Played(hybrid.loaded, prompt, [30])
    logits = torch.empty(0)
    while played.works:
        logits = runner.logits(with_adapter([played.next()], adapter))
    assert relative_difference(logits[0], expected(prompt)) <= BOUND
    assert relative_difference(logits[0], hybrid.plain_logits(prompt)) > 100 * BOUND


def test_adapters_of_another_base_are_refused_by_name(tiny_models: Models, tmp_path: Path) -> None:
    trained(tiny_models("llama"), tmp_path, target_modules=["o_proj"])
    with pytest.raises(StartRefused, match=r"o_proj`: .* not of this base model"):
        load_adapter(tmp_path, tiny_models("qwen3").loaded.model)
    trained(tiny_models("deepseek_v3"), tmp_path / "latent", target_modules=["kv_b_proj"])
    with pytest.raises(StartRefused, match="no such linear layer"):
        load_adapter(tmp_path / "latent", tiny_models("llama").loaded.model)
    with pytest.raises(StartRefused, match=r"kv_b_proj`: .* latents"):
        load_adapter(tmp_path / "latent", tiny_models("deepseek_v3").loaded.model)


def test_directories_without_an_adapter_are_refused(tiny_models: Models, tmp_path: Path) -> None:
    model = tiny_models("llama").loaded.model
    with pytest.raises(StartRefused, match=r"adapter_config.json: No such file"):
        load_adapter(tmp_path, model)
    (tmp_path / "adapter_config.json").write_text("[" * 100_000)
    with pytest.raises(StartRefused, match="not valid JSON"):
        load_adapter(tmp_path, model)
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 4, "lora_alpha": 4}')
    with pytest.raises(StartRefused, match=r"adapter_model.safetensors: No such file"):
        load_adapter(tmp_path, model)
    (tmp_path / "adapter_model.safetensors").write_bytes(b"{}" * 40)
    with pytest.raises(StartRefused, match="damaged"):
        load_adapter(tmp_path, model)
