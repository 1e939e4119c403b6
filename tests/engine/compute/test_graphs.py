"""Decode graphs without a device: instead of a captured graph the same step runs again over the
same memory, and must answer as the plain way does."""

import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.cache.digests import ChainKind
from engine.cache.ids import BlockId
from engine.cache.recurrent import StateMove
from engine.compute.attention.tiles import split_tokens
from engine.compute.batch import pack
from engine.compute.graphs.buffers import StepBuffers
from engine.compute.graphs.capture import PlainCapture
from engine.compute.graphs.decode import DecodeGraphs
from engine.compute.graphs.plan import GraphPlan
from engine.compute.graphs.rule import (
    MOST_PARTS,
    MOST_ROWS,
    PLAIN,
    TOO_MANY_PARTS,
    TOO_MANY_ROWS,
    GraphSizes,
    why_plain,
)
from engine.compute.kv import KvLayout, KvPool
from engine.compute.runner import TorchRunner
from engine.compute.sampler import HEAD, is_greedy, sample_rows
from engine.schedule.runner import DrawnProbs, SampleParams, Work
from scripts.stack import ROOT
from tests.engine.compute.conftest import MakeModel
from tests.engine.compute.tiny import GREEDY, VOCABULARY, TinyModel, new_works, random_prompt
from tests.engine.schedule.harness import Harness, Sent

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")

CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen3", "mistral", "gemma2", "gpt_oss", "deepseek_v3", "mimo_v2", "gemma4")
DRAWN = SampleParams(temperature=0.8, top_p=0.95, top_k=0, seed=3)
# What asks the device for a value, or for a shape that depends on one.
ASKS = {
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::is_nonzero",
    "aten::item",
    "aten::masked_select",
    "aten::nonzero",
    "aten::unique_dim",
    "aten::_unique2",
}
Models = Callable[[str], TinyModel]


@pytest.fixture
def models(models_by_attention: MakeModel) -> Models:
    return lambda family: models_by_attention(family, "cpp")


def with_graphs(
    model: TinyModel, most_rows: int = 6, num_blocks: int = 64, block_size: int = 8
) -> TorchRunner:
    plan = GraphPlan(PlainCapture(), most_rows)
    return model.loaded.runner(num_blocks, block_size, graphs=plan)


def graphs_of(runner: TorchRunner) -> DecodeGraphs:
    assert runner.graphs is not None
    return runner.graphs


# Whole engines.


def random_sample(rng: random.Random) -> SampleParams:
    if rng.random() < 0.4:
        return GREEDY
    return SampleParams(
        temperature=rng.choice([0.3, 1.0, 1.7]),
        top_p=rng.choice([0.5, 0.9, 1.0]),
        top_k=rng.choice([0, 1, 5, 40]),
        min_p=rng.choice([0.0, 0.05]),
        seed=rng.randrange(1000),
    )


def play(runner: TorchRunner, seed: int, num_blocks: int) -> tuple[list[list[int]], Harness]:
    """Answers to requests that come, fork, are preempted and cancelled, and the engine."""
    rng = random.Random(seed)
    engine = Harness(num_blocks=num_blocks, block_size=4, max_running=6, runner=runner, scaffold=1)
    prefix = [rng.randrange(VOCABULARY) for _ in range(18)]
    sents: list[Sent] = []
    for _ in range(80):
        if len(sents) < 16 and rng.random() < 0.3:
            suffix = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 20))]
            sents.append(
                engine.send(
                    *([prefix, suffix] if rng.random() < 0.6 else [suffix]),
                    marks={0: "5m"},
                    max_tokens=rng.randint(1, 24),
                    choices=rng.choice([1, 1, 1, 3]),
                    scope=rng.choice("ab"),
                    sample=random_sample(rng),
                )
            )
        if sents and rng.random() < 0.04:
            engine.loop.cancel(rng.choice(sents).state.request_id)
        engine.step()
    while engine.scheduler.has_work:
        engine.step()
    answers = [turn.answer(choice) for turn in sents for choice in range(len(turn.state.sequences))]
    return answers, engine


@pytest.mark.parametrize("seed", range(3))
def test_engines_answer_the_same_with_graphs_and_without(models: Models, seed: int) -> None:
    """Batches grow and shrink, fork, are preempted and cancelled; greedy and seeded."""
    num_blocks = 34
    model = models("llama")
    runner = with_graphs(model, 5, num_blocks, 4)
    launched, engine = play(runner, seed, num_blocks)
    plain, _ = play(model.loaded.runner(num_blocks, 4), seed, num_blocks)
    assert launched == plain
    assert graphs_of(runner).num_launched > 20
    assert engine.scheduler.num_preempted and engine.pool.num_copied
    assert len({token for answer in launched for token in answer}) > 30


# A runner.


def decoding(
    rng: random.Random, runners: Sequence[TorchRunner], num: int, sample: SampleParams = GREEDY
) -> list[Work]:
    """Works of one token each behind prompts that all runners have computed."""
    works: list[Work] = []
    for index in range(num):
        prompt = random_prompt(rng, 2, 60)
        head, tail = new_works(prompt, [len(prompt) - 1], range(8 * index, 8 * index + 8))
        for runner in runners:
            runner.execute([head])
        works.append(replace(tail, sample=replace(sample, seed=sample.seed + index)))
    return works


@pytest.mark.parametrize("family", FAMILIES)
def test_models_of_all_kinds_draw_the_same(models: Models, family: str) -> None:
    model = models(family)
    runner = with_graphs(model)
    plain = model.runner()
    rng = random.Random(5)
    for sample in (GREEDY, DRAWN):
        works = decoding(rng, [runner, plain], 5, sample)
        for num in (1, 3, 5):
            assert runner.execute(works[:num]) == plain.execute(works[:num])
    assert graphs_of(runner).num_launched == 6


def test_rows_that_are_no_sequences_write_to_a_block_that_nobody_has(models: Models) -> None:
    runner = with_graphs(models("llama"), most_rows=8)
    pool = runner.pool
    assert pool.scratch_block == pool.num_blocks == 64
    torch.manual_seed(1)
    for plane in (*pool.keys, *pool.values):
        plane.normal_()
    before = [plane.clone() for plane in (*pool.keys, *pool.values)]
    works = [
        Work(token_ids=[7], start=start, block_table=[*range(first, first + 8)], sample=DRAWN)
        for start, first in ((0, 0), (37, 8), (63, 40))
    ]
    runner.execute(works)
    assert graphs_of(runner).num_launched == 1
    slots = {
        (table[start // 8], start % 8) for table, start in ((w.block_table, w.start) for w in works)
    }
    for plane, was in zip((*pool.keys, *pool.values), before, strict=True):
        changed = (plane != was).flatten(2).any(-1).nonzero().tolist()
        assert {(block, slot) for block, slot in changed} == slots | {(64, 0)}


def plain_works() -> dict[str, Work]:
    """By the reason a work that goes the plain way."""
    table = [BlockId(0)]
    work = Work(token_ids=[5], start=0, block_table=table, sample=GREEDY)
    return {
        "several tokens of a sequence, as in prefill": replace(work, token_ids=[5, 6]),
        "nothing is drawn behind a token": replace(work, sample=None),
        "a token mask": replace(work, allowed=bytes([0b1000])),
        "a bias, or a presence or frequency penalty": replace(work, bias={3: 100.0}),
        "a repetition penalty": replace(work, seen=bytearray(9)),
        "log-probabilities": replace(work, probs=DrawnProbs(2)),
        "an adapter": replace(work, adapter=ChainKind("digest", 0)),
        "a recurrent state": replace(work, state=StateMove(None, [BlockId(1)])),
        f"a top-k of more than {HEAD}": replace(work, sample=replace(DRAWN, top_k=HEAD + 1)),
    }


SIZES = GraphSizes(6, 512, 1024)


@pytest.mark.parametrize("reason", PLAIN)
def test_a_work_that_no_graph_computes_is_told(reason: str) -> None:
    work = plain_works()[reason]
    plain = Work(token_ids=[5], start=0, block_table=[1], sample=GREEDY)
    assert why_plain([plain], SIZES) is None
    assert why_plain([plain, work], SIZES) == reason


def test_too_large_a_step_is_told() -> None:
    work = Work(token_ids=[5], start=0, block_table=[1], sample=GREEDY)
    assert why_plain([work] * 6, SIZES) is None
    assert why_plain([work] * 7, SIZES) == TOO_MANY_ROWS
    sizes = GraphSizes(64, 131_072, 1024)
    far = replace(work, start=131_071)
    assert why_plain([far] * 31, sizes) is None
    assert why_plain([far] * 32, sizes) == TOO_MANY_PARTS


def test_a_draft_has_several_tokens() -> None:
    work = Work(token_ids=[5, 6], start=0, block_table=[1], sample=GREEDY, draft=[6])
    assert why_plain([work], SIZES) == next(iter(PLAIN))


@pytest.mark.parametrize(
    "reason",
    [reason for reason, work in plain_works().items() if not (work.adapter or work.state)],
)
def test_steps_that_no_graph_computes_go_the_plain_way(models: Models, reason: str) -> None:
    model = models("llama")
    runner = with_graphs(model)
    plain = model.runner()
    works = decoding(random.Random(6), [runner, plain], 2)
    runner.execute(works)
    graphs = graphs_of(runner)
    work = replace(plain_works()[reason], block_table=[BlockId(32)])
    assert runner.execute([*works, work]) == plain.execute([*works, work])
    assert graphs.num_launched == 1
    assert runner.execute(works) == plain.execute(works)
    assert graphs.num_launched == 2


def test_each_reason_has_a_work_here() -> None:
    assert plain_works().keys() == PLAIN.keys()


def test_the_page_has_the_rule_and_no_other_reason() -> None:
    page = (ROOT / "engine" / "README.md").read_text("utf-8")
    (_, _, table) = page.partition("| what a step has | |\n|---|---|\n")
    rows = table.partition("\n\n")[0].splitlines()
    reasons = [row.strip("| ").split(" | ")[0] for row in rows if "| the plain way" in row]
    assert reasons == [*PLAIN, TOO_MANY_ROWS, TOO_MANY_PARTS]


# What the host does meanwhile.


class Watch(TorchDispatchMode):
    """Notes transfers and what asks the device for a value."""

    def __init__(self, graphs: DecodeGraphs) -> None:
        super().__init__()
        mirrored = [*graphs.buffers.mirrored, graphs.drawn]
        self._of_host = {tensor.host.untyped_storage().data_ptr() for tensor in mirrored}
        self.sent = 0
        self.fetched = 0
        self.asked: list[str] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        name = func._schema.name
        if name == "aten::copy_":
            to, source = (tensor.untyped_storage().data_ptr() for tensor in args[:2])
            self.fetched += to in self._of_host
            self.sent += source in self._of_host
        by_mask = name == "aten::index" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in ASKS or by_mask:
            self.asked.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("sample", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_a_step_asks_the_device_once(models: Models, family: str, sample: SampleParams) -> None:
    runner = with_graphs(models(family))
    works = decoding(random.Random(7), [runner], 5, sample)
    with Watch(graphs_of(runner)) as watch:
        runner.execute(works)
    assert graphs_of(runner).num_launched == 1
    assert watch.fetched == 1 and not watch.asked
    assert watch.sent == 7 + (not is_greedy(sample))


def test_the_watch_sees_what_the_plain_way_asks(models: Models) -> None:
    runner = with_graphs(models("llama"))
    works = decoding(random.Random(7), [runner], 3, DRAWN)
    with Watch(graphs_of(runner)) as watch:
        runner.execute([replace(works[0], probs=DrawnProbs(1)), *works[1:]])
    assert watch.asked and not watch.fetched


def memory_of(runner: TorchRunner) -> list[int]:
    graphs = graphs_of(runner)
    mirrored = [*graphs.buffers.mirrored, graphs.drawn]
    planes = [*runner.pool.keys, *runner.pool.values]
    tensors = [*planes, *(m.device for m in mirrored), *(m.host for m in mirrored)]
    return [tensor.data_ptr() for tensor in tensors]


def test_memory_never_moves(models: Models) -> None:
    runner = with_graphs(models("llama"))
    before = memory_of(runner)
    rng = random.Random(8)
    works = decoding(rng, [runner], 6, DRAWN)
    for _ in range(30):
        runner.execute(rng.sample(works, rng.randint(1, 6)))
        assert memory_of(runner) == before
    assert graphs_of(runner).num_launched == 30


def test_draws_that_the_likeliest_tokens_do_not_decide_are_drawn_whole() -> None:
    """A large and flat vocabulary, beside rows that are greedy and rows with a top-k."""
    vocabulary = 20 * HEAD
    torch.manual_seed(2)
    logits = 0.01 * torch.randn(6, vocabulary)
    layout = KvLayout(num_layers=1, num_kv_heads=1, head_dim=8, dtype=torch.float32)
    graphs = DecodeGraphs(
        lambda batch, _: logits[: len(batch.token_ids)],
        KvPool(layout, 8, 4, CPU, has_scratch=True),
        GraphSizes(6, 32, split_tokens(4)),
        vocabulary=vocabulary,
        tile_rows=4,
        share=True,
    )
    graphs.capture(PlainCapture())
    for turn in range(10):
        params = [
            replace(
                DRAWN, seed=10 * turn + row, top_k=40 * (row == 2), top_p=1.0 - 0.1 * (row == 3)
            )
            for row in range(5)
        ]
        params[4] = GREEDY
        works = [
            Work(token_ids=[1], start=row, block_table=[row, row], sample=how)
            for row, how in enumerate(params)
        ]
        expected_tokens = sample_rows(
            logits[:4], params[:4], [work.next_position for work in works[:4]]
        )
        assert graphs.execute(works) == [*expected_tokens, int(logits[4].argmax())]
    assert (graphs.drawn.numbers[1, [0, 1]] == 0).any(), "the likeliest tokens decided all"


# Sizes and memory.


def prefixes(draw: st.DrawFn) -> Iterator[list[int]]:
    """Tables that begin alike in groups."""
    first = 0
    for _ in range(draw(st.integers(1, 4))):
        shared = draw(st.integers(0, 200))
        for _ in range(draw(st.integers(1, 5))):
            num_unshared = draw(st.integers(1, 150))
            yield [*range(10_000, 10_000 + shared), *range(first, first + num_unshared)]
            first += num_unshared


@st.composite
def steps(draw: st.DrawFn) -> list[Work]:
    return [
        Work(
            token_ids=[1],
            start=draw(st.integers(16 * len(table) - 16, 16 * len(table) - 1)),
            block_table=table,
            sample=GREEDY,
        )
        for table in prefixes(draw)
    ]


@settings(max_examples=60, deadline=None)
@given(steps(), st.integers(1, 24), st.sampled_from([1, 4, 16]))
def test_a_step_that_the_rule_lets_through_has_room(
    works: list[Work], most_rows: int, tile_rows: int
) -> None:
    sizes = GraphSizes(most_rows, 16 * 350, split_tokens(16))
    assert (why_plain(works, sizes) is None) == (len(works) <= most_rows)
    if len(works) > most_rows:
        return
    packed = pack(works, 16)
    tiles = packed.cut(tile_rows, share=True)
    size = sizes.fitting(len(works), tiles.num_parts, draws=False)
    assert size in sizes.all()
    assert len(works) <= size.rows <= max(most_rows, 1)
    buffers = StepBuffers(
        size.rows, size.parts, blocks_a_part=64, scratch_slot=9, vocabulary=5, device=CPU
    )
    buffers.send(size, packed, tiles, [GREEDY] * len(works), [0] * len(works))
    placed = buffers.placed(size)
    assert [tile for tile in placed.wide.tolist() if tile[1]] == tiles.wide.tolist()
    assert [tile for tile in placed.narrow.tolist() if tile[1]] == tiles.narrow.tolist()
    assert placed.table[: len(tiles.table)].tolist() == tiles.table.tolist()
    assert placed.offsets.tolist()[: len(works) + 1] == tiles.offsets.tolist()
    assert set(placed.offsets.tolist()[len(works) :]) == {tiles.num_parts}
    slots = buffers.batch(size).slots.tolist()
    assert slots == [*packed.slots.tolist(), *[9] * (size.rows - len(works))]


def test_sizes_are_few_and_bounded() -> None:
    sizes = GraphSizes(36, 131_072, 1024)
    assert sizes.rows == [1, 2, 4, 8, 16, 32, 36]
    assert GraphSizes(1, 100, 1024).rows == [1]
    most = GraphSizes(10**6, 10**9, 1024)
    assert most.rows[-1] == MOST_ROWS
    assert max(size.parts for size in most.all()) == MOST_PARTS
    assert len(most.all()) < 100
    assert [size.rows for size in sizes.all()] == sorted(
        (size.rows for size in sizes.all()), reverse=True
    )


def test_memory_is_counted(models: Models) -> None:
    loaded = models("llama").loaded
    plan = GraphPlan(PlainCapture(), 6)
    runner = loaded.runner(64, 8, graphs=plan)
    graphs = graphs_of(runner)
    buffers = graphs.buffers.num_bytes + graphs.drawn.device.nbytes + 6 * VOCABULARY * 4
    counted = loaded.graph_bytes(plan, 8)
    assert counted > buffers
    assert counted < loaded.graph_bytes(GraphPlan(PlainCapture(), 60), 8)
    bare = loaded.runner(64, 8)
    assert bare.pool.scratch_block is None
    assert runner.pool.num_bytes - bare.pool.num_bytes == runner.pool.block_bytes
