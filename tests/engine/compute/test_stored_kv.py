"""What the store keeps of real KV memory, and what it tells models apart by."""

from collections.abc import Callable

import pytest
import torch

from engine.cache.ids import BlockId
from engine.compute.kv import KvLayout, KvPool
from engine.compute.loading import model_facts
from engine.store.files import fingerprint
from tests.engine.compute.tiny import TinyModel

BLOCKS = [BlockId(block) for block in (1, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_saved_block_comes_back_to_the_bit(dtype: torch.dtype) -> None:
    layout = KvLayout(num_layers=3, num_kv_heads=2, head_dim=8, dtype=dtype)
    pool = KvPool(layout, 6, 4, torch.device("cpu"))
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape).to(dtype))
    saved = pool.save(BLOCKS)
    assert all(len(payload) == layout.bytes_per_block(4) for payload in saved)
    assert saved[0] != saved[1]
    pool.load([(saved[0], BlockId(0)), (saved[1], BlockId(5))])
    for tensor in (*pool.keys, *pool.values):
        assert torch.equal(tensor[0], tensor[1]) and torch.equal(tensor[5], tensor[4])
    with pytest.raises(ValueError, match="layout"):
        pool.load([(saved[0][:-1], BlockId(0))])


def test_a_model_is_told_from_one_with_a_single_other_weight(
    tiny_models: Callable[[str], TinyModel],
) -> None:
    model = tiny_models("llama")
    before = fingerprint(model_facts(model.loaded, 8))
    assert fingerprint(model_facts(model.loaded, 8)) == before
    assert fingerprint(model_facts(model.loaded, 16)) != before
    weight = next(model.loaded.model.parameters()).data.view(-1)
    kept = float(weight[7])
    weight[7] += 1e-3
    assert fingerprint(model_facts(model.loaded, 8)) != before
    weight[7] = kept
    assert fingerprint(model_facts(model.loaded, 8)) == before


def test_what_another_way_of_attention_computed_is_another_models(
    both_attentions: Callable[[str], TinyModel], tiny_models: Callable[[str], TinyModel]
) -> None:
    made, usual = both_attentions("llama").loaded, tiny_models("llama").loaded
    is_alike = type(made.kernel) is type(usual.kernel)
    assert (model_facts(made, 8) == model_facts(usual, 8)) == is_alike
