"""Documents that are copied to other positions, against torch's own forward over the same keys,
turned by hand, and the rest computed."""

import math
import random
from collections.abc import Callable

import pytest
import torch
from msgspec import structs
from transformers import DynamicCache

from engine.compute.compress import KvCompressor
from engine.compute.gate import RECOMPUTES, compute_apart, measure, place_documents
from engine.compute.place import STYLES, Turns, find_turns
from engine.compute.scorers import Instructions
from engine.protocol.reports import why_refused
from engine.schedule.runner import Work
from tests.engine.compute.tiny import (
    GREEDY,
    TinyModel,
    new_tiny_model,
    random_prompt,
    relative_difference,
)

BOUND = 1e-5
Models = Callable[[str], TinyModel]
INSTRUCTIONS = Instructions([11, 12, 13], [11, 12], [21, 22])
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
    model: TinyModel, prompt: list[int], spans: Spans, recompute: int | float
) -> torch.Tensor:
    """The last token's, by transformers: token by token, but for those that are copied."""
    cache, whole = (DynamicCache(config=model.plain.config) for _ in range(2))
    model.plain(torch.tensor([prompt]), past_key_values=whole)
    place = 0
    for start, end in [*spans, (len(prompt), len(prompt))]:
        alone = DynamicCache(config=model.plain.config)
        model.plain(torch.tensor([[prompt[0], *prompt[start:end]]]), past_key_values=alone)
        again = set(range(start, min(start + int(recompute), end)))
        if isinstance(recompute, float):
            # What the first layer makes of all tokens is in the second one's values.
            far = (whole.layers[1].values[0, :, start:end] - alone.layers[1].values[0, :, 1:]) ** 2
            most = far.sum((0, 2)).argsort(descending=True)[: math.ceil(recompute * (end - start))]
            again = {start + index for index in most.tolist()}
        for position in range(place, end):
            if position < start or position in again:
                output = model.plain(
                    torch.tensor([[prompt[position]]]),
                    past_key_values=cache,
                    position_ids=torch.tensor([[position]]),
                )
                continue
            inside = slice(position - start + 1, position - start + 2)
            for layer, layer_cache in zip(alone.layers, cache.layers, strict=True):
                keys = turned(model, layer.keys[:, :, inside], start - 1)
                layer_cache.keys = torch.cat([layer_cache.keys, keys], 2)
                layer_cache.values = torch.cat([layer_cache.values, layer.values[:, :, inside]], 2)
        place = end
    logits: torch.Tensor = output.logits[0, -1]
    return logits


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_placed_documents_compute_what_torch_does(both_attentions: Models, family: str) -> None:
    model = both_attentions(family)
    rng = random.Random(5)
    turns = find_turns(model.loaded)
    assert turns is not None
    for recompute in (0, 5, 1000, 0.05, 0.3, 1.0):
        prompt = random_prompt(rng, 150, 200)
        spans = [(7, 60), (60, 95), (101, 140)]
        runner = model.loaded.runner(104, 8)
        compressor = KvCompressor(runner, INSTRUCTIONS, turns)
        prompt_blocks, *apart = (range(begin, begin + 26) for begin in (0, 26, 52, 78))
        compute_apart(runner, prompt, spans, apart)
        place_documents(runner, compressor, prompt, spans, apart, prompt_blocks, recompute)
        last = Work(token_ids=prompt[140:], start=140, block_table=prompt_blocks, sample=GREEDY)
        logits = runner.logits([last])[0]
        plain_logits = expected_logits(model, prompt, spans, recompute)
        assert relative_difference(logits, plain_logits) <= BOUND
        is_exact = relative_difference(logits, model.plain_logits(prompt)) <= BOUND
        assert is_exact == (recompute in (1000, 1.0))


def test_how_keys_turn_is_found_by_layer() -> None:
    turns = find_turns(new_tiny_model("llama").loaded)
    assert turns is not None and set(turns.styles) == {"halves"}
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


def test_the_gate_measures_every_number_and_share_of_recomputed_tokens() -> None:
    loaded = new_tiny_model("llama").loaded
    turns = find_turns(loaded)
    measurements = [
        measurement
        for measurement in measure(loaded, INSTRUCTIONS, turns)
        if measurement and measurement.method == "blocks"
    ]
    assert [measurement.parameter for measurement in measurements] == list(RECOMPUTES)
    for least, most in ((0, 3), (4, 6)):
        assert measurements[least].kl > measurements[most].kl >= 0
    assert all(measurement.tokens == 256 for measurement in measurements)
    refused = [
        structs.replace(measurement, is_allowed=measurement.parameter not in (4, 0.05))
        for measurement in measurements
    ]
    assert "blocks at 4 is too far" in (why_refused(refused, "blocks", 7) or "")
    assert "blocks at 0.05 is too far" in (why_refused(refused, "blocks", 0.1) or "")
    assert why_refused(refused, "blocks", 0.01) is why_refused(refused, "blocks", 0.2) is None
    assert not any(
        measurement and measurement.method == "blocks"
        for measurement in measure(loaded, INSTRUCTIONS, None)
    )
    assert why_refused([], "blocks", 16) is not None
