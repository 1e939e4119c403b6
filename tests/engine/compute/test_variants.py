"""What reading a sibling's entries costs: nothing of an equal model's, much of a stranger's."""

import shutil
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from engine.__main__ import main
from engine.compute.errors import ModelRefused
from engine.compute.loading import model_facts
from engine.compute.variants import profile, table_of
from tests.engine.compute.tiny import new_tiny_model
from tests.fuzz.tiny_model import write_tiny_model

SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.3,
}


def llama(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))  # type: ignore[no-untyped-call,arg-type]
    return model.eval()  # type: ignore[no-any-return]


def test_an_equal_model_costs_nothing_and_a_stranger_is_refused() -> None:
    base = llama(1)
    for row in profile(base, deepcopy(base), 2):
        assert row.kl < 1e-5 and row.agreement == 1.0 and row.is_allowed
    rows = list(profile(base, llama(2), 2))
    assert [row.parameter for row in rows] == [0, 1, 2, 3]
    assert [row.is_allowed for row in rows] == [False, False, False, True]
    assert rows[3].kl < 1e-5 < 0.5 < rows[0].kl
    assert "refuses the pair" in table_of(rows)


def test_the_first_layers_are_the_models_own() -> None:
    """A sibling that differs in the second layer alone costs nothing once that is recomputed.

    What the third layer keeps follows from the second's output: it differs too.
    """
    base = llama(1)
    sibling = llama(1)
    with torch.no_grad():
        sibling.model.layers[1].self_attn.k_proj.weight.mul_(-1)
    none, first, second, every = profile(base, sibling, 2)
    assert first.kl == pytest.approx(none.kl, abs=1e-6)  # its own first layer is the sibling's
    assert none.kl > second.kl > 1e-4 and every.kl < 1e-5
    with torch.no_grad():  # the output's weights are in no entry
        changed = deepcopy(base)
        changed.lm_head.weight.mul_(-1)
    assert all(row.kl < 1e-5 for row in profile(base, changed, 2))


def test_where_a_model_lies_is_no_fact_of_its_blocks() -> None:
    loaded = new_tiny_model("llama").loaded
    facts = model_facts(loaded, 16)
    loaded.model.config.name_or_path = "/elsewhere"
    assert model_facts(loaded, 16) == facts != model_facts(loaded, 32)


def test_models_that_are_no_siblings_are_refused() -> None:
    base = llama(1)
    smaller = LlamaForCausalLM(LlamaConfig(**SHAPE | {"intermediate_size": 64}))  # type: ignore[no-untyped-call,arg-type]
    turned = deepcopy(base)
    turned.config.rms_norm_eps = 1e-3
    for stranger in (smaller, turned):
        with pytest.raises(ModelRefused, match="more than their weights"):
            list(profile(base, stranger, 2))
    gliding = MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=8))  # type: ignore[arg-type]
    with pytest.raises(ModelRefused, match="not every layer"):
        list(profile(gliding, deepcopy(gliding), 2))


def test_the_command_prints_the_table_and_refuses_another_tokenizer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = write_tiny_model(tmp_path / "tiny")

    def run(sibling: Path) -> int:
        return main(["profile-variant", str(model), str(sibling)])

    assert run(model) == 0
    assert "allows it from 0 of" in capsys.readouterr().out
    stranger = tmp_path / "other"
    shutil.copytree(model, stranger)
    tokenizer = Tokenizer.from_file(str(stranger / "tokenizer.json"))
    tokenizer.add_tokens(["another one"])
    tokenizer.save(str(stranger / "tokenizer.json"))
    assert run(stranger) == 1
    refused = capsys.readouterr().err
    assert refused == "profile-variant: the models have different tokenizers\n"
