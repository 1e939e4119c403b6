"""The first layers alone, over what another model wrote, against torch's own forward."""

import copy
import random
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache

from engine.cache.ids import BlockId
from engine.compute.compress import KvCompressor, Told
from engine.compute.loading import prepare_model
from engine.schedule.runner import Move, Work
from tests.engine.compute.tiny import (
    GREEDY,
    TinyModel,
    new_works,
    random_prompt,
    relative_difference,
    run_in_turn,
)

BOUND = 1e-5


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_own_first_layers_before_anothers_compute_what_torch_does(
    both_attentions: Callable[[str], TinyModel], family: str
) -> None:
    model, rng = both_attentions(family), random.Random(3)
    other = copy.deepcopy(model.plain)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    others = prepare_model(copy.deepcopy(other)).runner(model.num_blocks, model.block_size)
    prompt, read = random_prompt(rng, 120, 150), 93
    free = [BlockId(block) for block in rng.sample(range(model.num_blocks), 23)]
    table, spare = free[:20], free[20:]
    run_in_turn(others, new_works(prompt[:read], [40], table))
    content = [bytes(one) for one in others.save(table)]
    with torch.inference_mode():
        kept = [one(torch.tensor([prompt[:read]])).past_key_values for one in (model.plain, other)]
    num_layers = model.plain.config.num_hidden_layers
    for depth in range(num_layers + 1):
        runner = model.runner()
        runner.load(list(zip(content, table, strict=True)))
        # In two steps, the first of two works of one sequence.
        first, second, third = [
            Work(token_ids=prompt[begin:end], start=begin, block_table=table)
            for begin, end in ((0, 30), (30, 31), (31, read))
        ]
        runner.write_layers([first, second], depth)
        runner.write_layers([third], depth)
        last = Work(token_ids=prompt[read:], start=read, block_table=table, sample=GREEDY)
        logits = runner.logits([last])[0]
        # The same in parts, from blocks of the sibling's to others, but for what was there.
        copier, copies = (
            model.runner(),
            [BlockId(b) for b in range(model.num_blocks) if b not in free],
        )
        copier.load(list(zip(content, table, strict=True)))
        compressor = KvCompressor(copier, Told([], [], []))
        before, behind = copies[:3], copies[3:]
        list(compressor.take_over(depth, prompt[:read], Move([(0, 24)], table, copies)))
        copier.copy_blocks(list(zip(before, spare, strict=True)))
        moved = [*spare, *behind]
        list(compressor.take_over(depth, prompt[:read], Move([(24, read)], table, moved)))
        again = Work(token_ids=prompt[read:], start=read, block_table=moved, sample=GREEDY)
        assert relative_difference(copier.logits([again])[0], logits) <= BOUND
        cache = DynamicCache()
        for layer in range(num_layers):
            rows = kept[0 if layer < depth else 1].layers[layer]
            cache.update(rows.keys, rows.values, layer)
        with torch.inference_mode():
            wanted = model.plain(torch.tensor([prompt[read:]]), past_key_values=cache).logits[0, -1]
        assert relative_difference(logits, wanted) <= BOUND
        is_exact = relative_difference(logits, model.plain_logits(prompt)) <= BOUND
        assert is_exact == (depth == num_layers)
