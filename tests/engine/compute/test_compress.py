"""Compressed prefixes, and first layers over what another model wrote, against transformers' own
forward over the same keys and values, and scores against kvpress 0.5.5's."""

import copy
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from engine.approximate.copying import Move
from engine.approximate.kinds import Compression, compression_of, new_compression
from engine.cache.ids import BlockId
from engine.compute import compress
from engine.compute.attention.replay import Replay
from engine.compute.compress import KvCompressor, check_compressible
from engine.compute.errors import ModelRefused
from engine.compute.gate import MIN_AGREEMENT, measure
from engine.compute.loading import prepare_model
from engine.compute.scorers import SCORE_KEYS, SINKS, Instructions, choose, h2o, pieces, snapkv
from engine.protocol import SCORERS, Scorer
from engine.protocol.reports import why_refused
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
VECTORS = json.loads((Path(__file__).parent / "kvpress_scores.json").read_text())
KEYS = torch.sin(torch.arange(2 * 47 * 16) ** 1.5).view(2, 47, 16)
"""The keys of which kvpress made its scores."""
IDS = [(i * i * 7 + i * 3) % 199 for i in range(100)]
INSTRUCTIONS = Instructions([11, 12, 13], [11, 12], [21, 22])
"""What it made scores of attention of, with the tiny Llama."""


def expected_logits(model: TinyModel, prompt: list[int], how: Compression) -> torch.Tensor:
    """The last token's, by transformers: the prefix's cache cut to what each layer keeps."""
    cache = DynamicCache(config=model.plain.config)
    with torch.inference_mode():
        model.plain(torch.tensor([prompt[: how.of]]), past_key_values=cache)
        for layer in cache.layers:
            scores = SCORE_KEYS[how.scorer](layer.keys[0], how.kept)
            indices = choose(scores, how.kept)
            layer.keys = layer.keys[:, :, indices]
            layer.values = layer.values[:, :, indices]
        tail = torch.tensor([prompt[how.of :]])
        positions = torch.arange(how.of, len(prompt))[None]
        output = model.plain(tail, past_key_values=cache, position_ids=positions)
    logits: torch.Tensor = output.logits[0, -1]
    return logits


@pytest.mark.parametrize("scorer", SCORE_KEYS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_compressed_prefix_computes_what_transformers_does_over_what_is_kept(
    both_attentions: Models, family: str, scorer: Scorer
) -> None:
    model = both_attentions(family)
    rng = random.Random(3)
    for keep in (0.25, 0.75):
        prompt = random_prompt(rng, 90, 150)
        of = rng.randint(70, 85)
        how = Compression(scorer, keep, of, int(of * keep) // 8 * 8)
        runner = model.runner()
        run_in_turn(runner, new_works(prompt[:of], [30], range(20)))
        targets = [BlockId(block) for block in range(20, 45)]
        sources = list(map(BlockId, range(20)))
        compressor = KvCompressor(runner, INSTRUCTIONS)
        steps = list(compressor.compress(how, prompt[:of], Move([(0, how.kept)], sources, targets)))
        assert len(steps) == model.loaded.layout.num_layers
        tail = prompt[of:]
        half = len(tail) // 2
        works = [
            Work(token_ids=tail[:half], start=how.kept, block_table=targets, cut=how.cut),
            Work(
                token_ids=tail[half:],
                start=how.kept + half,
                block_table=targets,
                sample=GREEDY,
                cut=how.cut,
            ),
        ]
        logits = run_in_turn(runner, works)
        assert relative_difference(logits, expected_logits(model, prompt, how)) <= BOUND
        assert relative_difference(logits, model.plain_logits(prompt)) > 100 * BOUND


def test_scores_are_those_of_kvpress() -> None:
    for scorer in ("keydiff", "sinks"):
        scores = SCORE_KEYS[scorer](KEYS, int(47 * 0.5))
        assert torch.allclose(scores, torch.tensor(VECTORS[scorer]), atol=2e-6)
    # Whole chunks of 20 there: of three the best one.
    order = SCORE_KEYS["chunkkv"](KEYS, 20).sum(0).sort(descending=True, stable=True).indices
    assert sorted(order[: len(VECTORS["chunkkv_kept"])].tolist()) == VECTORS["chunkkv_kept"]


def test_scores_of_attention_are_those_of_kvpress(both_attentions: Models) -> None:
    """By running over a prefix, in several steps, while another sequence's blocks lie between."""
    runner = both_attentions("llama").runner()
    table = [3, 9, 1, *range(20, 31)]
    run_in_turn(runner, new_works(IDS, [30], table))
    before = runner.pool.read_bytes(list(map(BlockId, range(64)))).clone()
    ((columns, behind),) = pieces(IDS, INSTRUCTIONS)
    blocks = torch.tensor(table[:13])
    columns_replay = Replay(runner.pool, blocks, 100, columns)
    self_replay = Replay(runner.pool, blocks, 100, range(100), is_own=True)
    last = Replay(runner.pool, blocks, 100, range(100), is_own=True)
    for begin in range(0, len(behind), 40):
        runner.replay(behind[begin : begin + 40], 100 + begin, columns_replay)
    for begin in range(0, 100, 40):
        runner.replay(IDS[begin : begin + 40], begin, self_replay)
    runner.replay(IDS[-64:], 36, last)
    for layer in range(3):
        for scorer, scores in (
            ("kvzip", columns_replay.noted[layer]),
            ("h2o", h2o(self_replay.noted[layer])),
            ("snapkv", snapkv(last.noted[layer])),
        ):
            assert torch.allclose(scores, torch.tensor(VECTORS[scorer][layer]), atol=2e-5), scorer
    assert torch.equal(runner.pool.read_bytes(list(map(BlockId, range(64)))), before)


@torch.inference_mode()
@pytest.mark.parametrize("scorer", ["kvzip", "snapkv", "h2o"])
def test_scorers_that_run_over_the_prefix_keep_what_they_like(
    both_attentions: Models, scorer: Scorer
) -> None:
    model = both_attentions("llama")
    runner = model.runner()
    sources = list(map(BlockId, range(13)))
    run_in_turn(runner, new_works(IDS, [], sources))
    targets = list(map(BlockId, range(20, 27)))
    how = Compression(scorer, 0.56, 100, 56)
    move = Move([(0, how.kept)], sources, targets)
    steps = list(KvCompressor(runner, INSTRUCTIONS).compress(how, IDS, move))
    assert max(steps) <= 128 and sum(steps[:-3]) == {"kvzip": 105, "snapkv": 64, "h2o": 100}[scorer]
    scores = torch.tensor(VECTORS[scorer])
    for layer in range(3):
        by_head = scores[layer].amax(0, keepdim=True) if scorer == "kvzip" else scores[layer]
        keys = runner.pool.gather(layer, torch.tensor(sources))[0].clone()
        copied = runner.pool.gather(layer, torch.tensor(targets))[0]
        assert torch.equal(copied, keys[choose(by_head, 56)])


@torch.inference_mode()
def test_scores_of_a_long_prefix_take_bounded_memory(
    both_attentions: Models, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = both_attentions("llama").runner()
    sources = list(map(BlockId, range(13)))
    run_in_turn(runner, new_works(IDS, [], sources))
    # Of 100 tokens over 100 and themselves, ten at a time.
    monkeypatch.setattr(compress, "_STEP_BYTES", 4 * runner.num_heads * 200 * 10)
    how = Compression("h2o", 0.56, 100, 56)
    targets = list(map(BlockId, range(20, 27)))
    move = Move([(0, how.kept)], sources, targets)
    steps = list(KvCompressor(runner, INSTRUCTIONS).compress(how, IDS, move))
    assert steps[:-3] == [10] * 10


def test_the_first_tokens_are_kept_and_equal_scores_go_by_place() -> None:
    indices = choose(torch.zeros(2, 40), 10)
    assert indices.tolist() == list(range(10))
    worst_first = torch.arange(40.0)[None]
    assert choose(worst_first, 6).tolist() == [*range(SINKS), 38, 39]


def test_a_kind_is_read_back_from_its_digest() -> None:
    how = new_compression("chunkkv", 0.35, 1001, 16)
    assert how is not None and how.kept == 352 and how.cut == 649
    assert compression_of(how.kind, 16) == how
    assert compression_of(None, 16) is None
    assert compression_of(how.kind._replace(digest="ab" * 32), 16) is None
    variants = [
        replace(how, scorer="keydiff"),
        replace(how, keep=0.36),
        replace(how, of=1002),
    ]
    assert len({technique.kind for technique in (how, *variants)}) == 4
    # Too short a prefix is not compressed, nor one of which nothing would go.
    assert new_compression("keydiff", 0.5, 96, 16) is None
    assert new_compression("keydiff", 0.99, 100, 16) is None


def test_models_that_it_does_not_fit_are_refused(tiny_models: Models) -> None:
    check_compressible(tiny_models("llama").loaded)
    for family, why in (("gemma2", "sliding"), ("deepseek_v3", "latent"), ("gpt_oss", "sliding")):
        with pytest.raises(ModelRefused, match=why):
            check_compressible(tiny_models(family).loaded)


def test_the_gate_measures_every_technique_and_refuses_what_is_too_far() -> None:
    rows = measure(new_tiny_model("llama").loaded, INSTRUCTIONS, None)
    measurements = [row for row in rows if row is not None]
    assert {(measurement.method, measurement.parameter) for measurement in measurements} == {
        (scorer, keep) for scorer in SCORERS for keep in (0.75, 0.5, 0.25, 0.1)
    }
    by_kind = {
        (measurement.method, measurement.parameter): measurement for measurement in measurements
    }
    assert all(
        measurement.kl >= 0 and 0 <= measurement.agreement <= 1 and measurement.tokens == 256
        for measurement in measurements
    )
    # A random model's next token depends on every token before.
    worst = by_kind["random", 0.1]
    assert worst.agreement < MIN_AGREEMENT and not worst.is_allowed
    assert "random at 0.1" in (why_refused(measurements, "random", 0.2) or "")
    assert why_refused(measurements, "random", 0.05) is not None
    assert why_refused([], "keydiff", 0.5) is not None


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_own_first_layers_before_anothers_compute_what_torch_does(
    both_attentions: Callable[[str], TinyModel], family: str
) -> None:
    model = both_attentions(family)
    rng = random.Random(3)
    sibling = copy.deepcopy(model.plain)
    with torch.no_grad():
        for weight in sibling.parameters():
            weight.add_(0.2 * weight.std() * torch.randn_like(weight))
    sibling_runner = prepare_model(copy.deepcopy(sibling)).runner(
        model.num_blocks, model.block_size
    )
    prompt = random_prompt(rng, 120, 150)
    read_tokens = 93
    free = [BlockId(block) for block in rng.sample(range(model.num_blocks), 23)]
    table = free[:20]
    spare = free[20:]
    run_in_turn(sibling_runner, new_works(prompt[:read_tokens], [40], table))
    content = [bytes(part) for part in sibling_runner.save(table)]
    with torch.inference_mode():
        caches = [
            network(torch.tensor([prompt[:read_tokens]])).past_key_values
            for network in (model.plain, sibling)
        ]
    num_layers = model.plain.config.num_hidden_layers
    for depth in range(num_layers + 1):
        runner = model.runner()
        runner.load(list(zip(content, table, strict=True)))
        # In two steps, the first of two works of one sequence.
        first, second, third = [
            Work(token_ids=prompt[begin:end], start=begin, block_table=table)
            for begin, end in ((0, 30), (30, 31), (31, read_tokens))
        ]
        runner.write_layers([first, second], depth)
        runner.write_layers([third], depth)
        last = Work(
            token_ids=prompt[read_tokens:], start=read_tokens, block_table=table, sample=GREEDY
        )
        logits = runner.logits([last])[0]
        # The same in parts, from blocks of the sibling's to others, but for what was there.
        copier = model.runner()
        copies = [BlockId(b) for b in range(model.num_blocks) if b not in free]
        copier.load(list(zip(content, table, strict=True)))
        compressor = KvCompressor(copier, Instructions([], [], []))
        before = copies[:3]
        behind = copies[3:]
        list(compressor.take_over(depth, prompt[:read_tokens], Move([(0, 24)], table, copies)))
        copier.copy_blocks(list(zip(before, spare, strict=True)))
        moved = [*spare, *behind]
        list(
            compressor.take_over(
                depth, prompt[:read_tokens], Move([(24, read_tokens)], table, moved)
            )
        )
        again = Work(
            token_ids=prompt[read_tokens:], start=read_tokens, block_table=moved, sample=GREEDY
        )
        assert relative_difference(copier.logits([again])[0], logits) <= BOUND
        cache = DynamicCache()
        for layer in range(num_layers):
            rows = caches[0 if layer < depth else 1].layers[layer]
            cache.update(rows.keys, rows.values, layer)
        with torch.inference_mode():
            expected_logits = model.plain(
                torch.tensor([prompt[read_tokens:]]), past_key_values=cache
            ).logits[0, -1]
        assert relative_difference(logits, expected_logits) <= BOUND
        is_exact = relative_difference(logits, model.plain_logits(prompt)) <= BOUND
        assert is_exact == (depth == num_layers)
