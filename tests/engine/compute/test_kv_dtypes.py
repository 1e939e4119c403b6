"""Keys and values of fewer bits: how near they are, and that sharing stays exact to the bit."""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import get_args

import msgspec
import pytest
import torch

from engine.cache.ids import BlockId
from engine.compute.kv import KvDtype, KvLayout, new_codec
from engine.compute.loading import LoadedModel, model_facts
from engine.compute.runner import TorchRunner
from engine.schedule.runner import Work
from engine.sizing import NotSizable, head_bytes
from engine.store.files import fingerprint
from tests.engine.compute.test_speculation import BATCH, ask_all, engine, frames_of, new_request
from tests.engine.compute.tiny import (
    GREEDY,
    TinyModel,
    new_works,
    random_prompt,
    run_in_turn,
)

NEAR = {"float16": 6e-4, "bfloat16": 5e-3, "fp8_e4m3": 0.07, "int8": 5e-3, "int4": 0.07}
"""Largest error of a number, as a share of the largest of its head."""
KINDS = [kind for kind in get_args(KvDtype) if kind != "model"]
Models = Callable[[str], TinyModel]


def kept_as(model: TinyModel, kind: KvDtype) -> LoadedModel:
    kernel = model.loaded.kernel if kind == "model" else None
    layout = replace(model.loaded.layout, kv_dtype=kind)
    return replace(model.loaded, layout=layout, kernel=kernel)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head_dim", [8, 128])
def test_numbers_come_back_nearly_whatever_their_size(kind: KvDtype, head_dim: int) -> None:
    codec = new_codec(kind, head_dim)
    assert codec is not None and codec.num_bytes == head_bytes(head_dim, kind)
    for size in (1e-4, 1.0, 300.0):
        numbers = size * torch.randn(50, 3, head_dim, generator=torch.Generator().manual_seed(1))
        codes = codec.encode(numbers)
        assert codes.dtype == torch.uint8 and codes.shape == (50, 3, codec.num_bytes)
        back = codec.decode(codes, torch.float32)
        largest = numbers.abs().amax(-1, keepdim=True)
        # Below its least step a type of 8 bits with a fixed exponent has nothing.
        least = 2e-3 if kind == "fp8_e4m3" else 4e-6
        error = (back - numbers.clamp(-448, 448) if kind == "fp8_e4m3" else back - numbers).abs()
        assert bool((error <= NEAR[kind] * largest + least).all())


@pytest.mark.parametrize("kind", KINDS)
def test_numbers_that_are_alike_zero_or_huge_stay_finite(kind: KvDtype) -> None:
    codec = new_codec(kind, 16)
    assert codec is not None
    for number in (0.0, 1.0, -3.5, 1e30, -1e30):
        back = codec.decode(codec.encode(torch.full((2, 16), number)), torch.float32)
        assert bool(back.isfinite().all())
        if abs(number) < 10:
            assert torch.allclose(back, torch.full((2, 16), number), rtol=5e-3)


def test_bytes_follow_the_type_and_a_head_that_int4_can_not_pair_is_refused() -> None:
    shape = {"num_layers": 4, "num_kv_heads": 4, "head_dim": 32, "dtype": torch.float32}
    plain = KvLayout(**shape)  # type: ignore[arg-type]
    assert plain.bytes_per_token == 4096
    taken = [replace(plain, kv_dtype=kind).bytes_per_token for kind in KINDS]
    expected_bytes = {
        "float16": 2048,
        "bfloat16": 2048,
        "fp8_e4m3": 1024,
        "int8": 1088,
        "int4": 640,
    }
    assert dict(zip(KINDS, taken, strict=True)) == expected_bytes
    with pytest.raises(NotSizable, match="even"):
        new_codec("int4", 15)


@pytest.mark.parametrize("kind", KINDS)
def test_behind_a_shared_copied_moved_or_stored_prefix_logits_are_equal_to_the_bit(
    tiny_models: Models, kind: KvDtype
) -> None:
    """In the same chunks: computed alone, over the first one's blocks, and over copies of them."""
    model = tiny_models("llama")
    rng = random.Random(5)
    runner = kept_as(model, kind).runner(64, 8, 8)
    prefix = random_prompt(rng, 21, 21)
    tail = random_prompt(rng, 9, 9)
    first = run_in_turn(runner, new_works([*prefix, *tail], [21], [0, 1, 2, 3]))
    alone = run_in_turn(runner, new_works([*prefix, *tail], [21], [9, 8, 7, 6]))
    assert torch.equal(first, alone)
    runner.copy_blocks([(BlockId(2), BlockId(20))])
    assert torch.equal(behind(runner, prefix, tail, [0, 1, 20, 21]), first)
    runner.demote([(BlockId(1), BlockId(4))])
    runner.promote([(BlockId(4), BlockId(30))])
    payload = runner.save([BlockId(0)])
    assert len(payload[0]) == runner.pool.layout.bytes_per_block(8)
    runner.load([(payload[0], BlockId(31))])
    runner.copy_blocks([(BlockId(2), BlockId(22))])
    assert torch.equal(behind(runner, prefix, tail, [31, 30, 22, 23]), first)


def behind(
    runner: TorchRunner, prefix: list[int], tail: list[int], table: list[int]
) -> torch.Tensor:
    """The logits of a tail whose prefix is in the table's blocks."""
    blocks = [BlockId(block) for block in table]
    work = Work(token_ids=tail, start=len(prefix), block_table=blocks, sample=GREEDY)
    return runner.logits([work])[0]


@pytest.mark.anyio
@pytest.mark.parametrize("kind", ["fp8_e4m3", "int4"])
async def test_answers_behind_a_cached_prefix_are_those_without_a_cache(kind: str) -> None:
    """Requests of all kinds, each asked with a workspace of its own, and again behind its entry."""
    rng = random.Random(8)
    requests = [new_request(rng, "r") for _ in range(BATCH // 2)]
    async with engine(num_blocks=300, min_cache_tokens=16, kv_dtype=kind) as backend:
        described = backend.describe()
        assert described.kv_dtype == kind
        assert described.kv_bytes_per_token == 2 * 4 * 4 * head_bytes(32, kind)
        for index, request in enumerate(requests):
            replies = []
            for turn in ("cold", "warm"):
                named = {"request_id": f"{turn}{index}", "scope": f"s{index}"}
                [answered] = await ask_all(backend, [msgspec.structs.replace(request, **named)])
                replies.append(answered)
            cold, warm = replies
            assert cold.usage is not None and warm.usage is not None
            assert cold.usage.cache_read_tokens == 0 < warm.usage.cache_read_tokens
            assert warm.output_tokens == cold.output_tokens
            assert frames_of(warm) == frames_of(cold)


def test_blocks_of_another_type_are_another_models(tiny_models: Models) -> None:
    model = tiny_models("llama")
    prints = {fingerprint(model_facts(kept_as(model, kind), 8)) for kind in get_args(KvDtype)}
    assert len(prints) == len(get_args(KvDtype))


def test_a_model_is_told_from_one_with_a_single_other_weight(tiny_models: Models) -> None:
    model = tiny_models("llama")
    before = fingerprint(model_facts(model.loaded, 8))
    assert fingerprint(model_facts(model.loaded, 8)) == before
    assert fingerprint(model_facts(model.loaded, 16)) != before
    weight = next(model.loaded.model.parameters()).data.view(-1)
    original = float(weight[7])
    weight[7] += 1e-3
    assert fingerprint(model_facts(model.loaded, 8)) != before
    weight[7] = original
    assert fingerprint(model_facts(model.loaded, 8)) == before


def test_what_another_way_of_attention_computed_is_another_models(
    both_attentions: Models, tiny_models: Models
) -> None:
    other_way = both_attentions("llama").loaded
    usual = tiny_models("llama").loaded
    is_alike = type(other_way.kernel) is type(usual.kernel)
    assert (model_facts(other_way, 8) == model_facts(usual, 8)) == is_alike
