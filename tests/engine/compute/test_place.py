"""Documents that are copied to other positions, against torch's own forward over the same keys,
turned by hand, and the rest computed."""

import random
from collections.abc import Callable

import pytest
import torch
from transformers import DynamicCache

from engine.cache.ids import BlockId
from engine.compute.compress import KvCompressor, Told
from engine.compute.gate import RECOMPUTES, measure
from engine.compute.place import STYLES, Turns, find_turns
from engine.protocol.reports import Placement, why_unplaced
from engine.schedule.runner import Work
from tests.engine.compute.tiny import (
    GREEDY,
    TinyModel,
    new_tiny_model,
    new_works,
    random_prompt,
    relative_difference,
    run_in_turn,
)

BOUND = 1e-5
Models = Callable[[str], TinyModel]
TOLD = Told([11, 12, 13], [11, 12], [21, 22])
Spans = list[tuple[int, int]]


def turned(model: TinyModel, keys: torch.Tensor, shift: int) -> torch.Tensor:
    """Keys (..., head_dim) moved, as complex numbers."""
    theta = model.plain.config.rope_parameters["rope_theta"]
    half = keys.shape[-1] // 2
    angles = shift * theta ** (-torch.arange(half, dtype=torch.float64) / half)
    pairs = torch.complex(keys[..., :half].double(), keys[..., half:].double())
    moved = pairs * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([moved.real, moved.imag], -1).float()


@torch.inference_mode()
def expected_logits(
    model: TinyModel, prompt: list[int], spans: Spans, recompute: int
) -> torch.Tensor:
    """The last token's, by transformers: token by token, but for those that are copied."""
    cache = DynamicCache(config=model.plain.config)
    place = 0
    for start, end in [*spans, (len(prompt), len(prompt))]:
        for position in range(place, min(start + recompute, end)):
            output = model.plain(
                torch.tensor([[prompt[position]]]),
                past_key_values=cache,
                position_ids=torch.tensor([[position]]),
            )
        place = end
        copied = range(min(start + recompute, end), end)
        if not copied:
            continue
        alone = DynamicCache(config=model.plain.config)
        model.plain(torch.tensor([[prompt[0], *prompt[start:end]]]), past_key_values=alone)
        for layer, own in zip(alone.layers, cache.layers, strict=True):
            inside = slice(copied.start - start + 1, None)
            keys = turned(model, layer.keys[:, :, inside], start - 1)
            own.keys = torch.cat([own.keys, keys], 2)
            own.values = torch.cat([own.values, layer.values[:, :, inside]], 2)
    logits: torch.Tensor = output.logits[0, -1]
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_placed_documents_compute_what_torch_does(both_attentions: Models, family: str) -> None:
    model, rng = both_attentions(family), random.Random(5)
    turns = find_turns(model.loaded)
    assert turns is not None
    for recompute in (0, 5, 1000):
        prompt = random_prompt(rng, 150, 200)
        spans = [(7, 60), (60, 95), (101, 140)]
        runner = model.runner()
        compressor = KvCompressor(runner, TOLD, turns)
        own, place, works = list(map(BlockId, range(30))), 0, list[Work]()
        for start, end in spans:
            alone = [prompt[0], *prompt[start:end]]
            table = list(map(BlockId, range(30, 40)))
            run_in_turn(runner, new_works(alone, [20], table))
            copied = min(start + recompute, end)
            list(compressor.place(start - 1, [(copied, end)], table, own))
            works.append(Work(token_ids=prompt[place:copied], start=place, block_table=own))
            place = end
        works.append(Work(token_ids=prompt[place:], start=place, block_table=own, sample=GREEDY))
        logits = run_in_turn(runner, [work for work in works if work.token_ids])
        wanted = expected_logits(model, prompt, spans, recompute)
        assert relative_difference(logits, wanted) <= BOUND
        is_exact = relative_difference(logits, model.plain_logits(prompt)) <= BOUND
        assert is_exact == (recompute == 1000)


def test_how_keys_turn_is_found_by_layer() -> None:
    found = find_turns(new_tiny_model("llama").loaded)
    assert found is not None and set(found.styles) == {"halves"}
    glm = find_turns(new_tiny_model("glm4").loaded)
    assert glm is not None and set(glm.styles) == {"pairs"}


def test_a_turn_is_one_of_the_distance_alone() -> None:
    turns = Turns(torch.tensor([1.0, 0.1, 0.01]))
    keys = torch.sin(torch.arange(2 * 8.0)).view(2, 8)
    for style in STYLES:
        there = turns.turned(turns.turned(keys, 40, style), 23, style)
        assert torch.allclose(there, turns.turned(keys, 63, style), atol=1e-5)
        assert torch.allclose(turns.turned(there, -63, style), keys, atol=1e-5)
        assert torch.equal(there[:, 6:], keys[:, 6:])


def test_a_model_whose_keys_turn_in_another_way_has_none() -> None:
    loaded = new_tiny_model("llama").loaded
    rotary = loaded.model.get_submodule("model.rotary_emb")
    rotary.register_forward_hook(lambda _, __, turns: (turns[0].flip(-1), turns[1].flip(-1)))
    assert find_turns(loaded) is None


def test_the_gate_measures_every_number_of_recomputed_tokens() -> None:
    loaded = new_tiny_model("llama").loaded
    turns = find_turns(loaded)
    found = [one for one in measure(loaded, TOLD, turns) if isinstance(one, Placement)]
    assert [one.recompute for one in found] == list(RECOMPUTES)
    assert found[0].kl > found[-1].kl >= 0 and all(one.tokens == 256 for one in found)
    assert why_unplaced(found, 7) is None or "recomputing 4 of a block is too far" in why_unplaced(
        found, 7
    )
    assert not any(isinstance(one, Placement) for one in measure(loaded, TOLD, None))
    assert why_unplaced([], 16) is not None
