"""What a GPU needs of the runner, the host tier and the load, as far as a CPU can show it."""

from collections.abc import Callable
from copy import deepcopy
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from engine.cache.ids import BlockId
from engine.compute import kv
from engine.compute.attention import step
from engine.compute.errors import ModelRefused
from engine.compute.kv import HostKv, KvLayout, KvPool
from engine.compute.loading import prepare_model
from engine.schedule.runner import Work
from tests.engine.compute.tiny import GREEDY, TinyModel

BLOCK_SIZE = 4
Models = Callable[[str], TinyModel]


def new_model(like: TinyModel) -> PreTrainedModel:
    """A model of its own, since to prepare one changes it and its configuration."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(deepcopy(like.plain.config))
    return model


def test_a_step_that_draws_nothing_waits_for_the_device(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else its time would be that of telling the device what to do, and the pace learns from it."""
    runner = tiny_models("llama").runner()
    waits = []
    monkeypatch.setattr(runner.pool, "wait", lambda: waits.append(None))
    table = [3, 1]
    assert runner.execute([Work(token_ids=[5, 6], start=0, block_table=table)]) == [None]
    assert len(waits) == 1
    runner.execute([Work(token_ids=[7], start=2, block_table=table, sample=GREEDY)])
    assert len(waits) == 1


def test_the_host_tier_is_in_pieces_and_keeps_each_block(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = KvLayout(num_layers=2, num_kv_heads=2, head_dim=8, dtype=torch.float32)
    monkeypatch.setattr(kv, "PIECE_BYTES", 2 * layout.bytes_per_block(BLOCK_SIZE) + 1)
    pool = KvPool(layout, 5, BLOCK_SIZE, torch.device("cpu"))
    tensors = (*pool.keys, *pool.values)
    for tensor in tensors:
        tensor.copy_(torch.randn(tensor.shape))
    before = [tensor.clone() for tensor in tensors]
    sizes: list[int] = []
    zeros = torch.zeros

    def counted(shape: tuple[int, ...], **options: bool) -> torch.Tensor:
        tier: torch.Tensor = zeros(shape, **options)
        sizes.append(tier.nbytes)
        return tier

    monkeypatch.setattr(torch, "zeros", counted)
    host = HostKv(pool, 5)
    assert max(sizes) <= kv.PIECE_BYTES
    assert host.num_bytes == sum(sizes) == 5 * layout.bytes_per_block(BLOCK_SIZE)
    host.demote([(BlockId(block), BlockId(4 - block)) for block in range(5)])
    for tensor in tensors:
        tensor.zero_()
    host.promote([(BlockId(4 - block), BlockId(block)) for block in range(5)])
    assert all(torch.equal(now, then) for now, then in zip(tensors, before, strict=True))


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_kernel_that_triton_cannot_run_is_told(tiny_models: Models) -> None:
    with pytest.raises(ModelRefused, match="the kernel in Triton does not run on this device: "):
        prepare_model(new_model(tiny_models("llama")), "triton")


def test_the_load_check_meets_a_decode_step(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kernels attend single rows in another way than chunks."""
    model = new_model(tiny_models("llama"))
    prepare_model(model, "sdpa")
    monkeypatch.setattr(step, "attend_decodes", lambda query, *_: torch.zeros_like(query))
    with pytest.raises(ModelRefused, match="not exact"):
        prepare_model(model, "sdpa")
