"""The paged kernel against plain attention. A load compares models with it with their own."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from engine.compute.attention.arithmetic import Layer, visible
from engine.compute.attention.step import Attend
from engine.compute.attention.tiles import split_tokens
from engine.compute.batch import build_batch, pack
from engine.compute.graphs.buffers import StepBuffers
from engine.compute.graphs.rule import GraphSizes
from engine.compute.kv import KvLayout, KvPool
from engine.compute.runner import Kernel
from engine.schedule.runner import SampleParams, Work

GREEDY = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
# Largest difference to attention in float32, as a share of the largest value. A wrong mask or table
# is off by a tenth or more; what is allowed is a few units in the last place.
ALLOWED = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
NUM_BLOCKS = 256


@dataclass(frozen=True, slots=True)
class Shape:
    heads: int
    kv_heads: int
    head_dim: int
    block_size: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False

    def __str__(self) -> str:
        extra = [f"window {self.window}"] if self.window else []
        extra += [f"softcap {self.softcap:g}"] if self.softcap else []
        extra += ["sinks"] * self.has_sinks
        head = f"{self.heads} heads, {self.kv_heads} KV heads of {self.head_dim}"
        return ", ".join([head, f"blocks of {self.block_size}", *extra])


SHAPES = [
    Shape(8, 2, 64, 16),
    Shape(32, 8, 128, 16),
    Shape(4, 4, 80, 16, window=24),
    Shape(6, 2, 32, 8, softcap=2.0),
    Shape(8, 1, 128, 16, window=40, softcap=5.0),
    Shape(16, 2, 256, 32),
    Shape(64, 8, 64, 16, window=128, has_sinks=True),
]
# Fewer shapes for the interpreter, which takes seconds for what takes a chip no time.
FEW_SHAPES = [
    Shape(4, 2, 32, 16),
    Shape(4, 4, 24, 8, window=24),
    Shape(3, 1, 16, 8, softcap=2.0, has_sinks=True),
]
# Starts and numbers of new tokens of a step's sequences: ragged on purpose.
STEPS = {
    "decode": [(0, 1), (37, 1), (15, 1), (16, 1), (1100, 1)],
    "prefill": [(0, 33), (70, 5), (5, 20)],
    "mixed": [(300, 1), (64, 17), (0, 2), (1023, 1), (1024, 1)],
}


NewKernel = Callable[[KvLayout, int], Kernel]
"""Takes what the pool keeps, and the number of query heads."""


def in_triton(layout: KvLayout, num_heads: int) -> Kernel:
    from engine.compute.attention.kernel import PagedKernel

    return PagedKernel(num_heads, layout.num_kv_heads)


Comparison = tuple[str, Callable[[], float]]
"""One comparison, with the largest difference as a share of the largest value."""


def kernel_comparisons(
    device: torch.device,
    dtype: torch.dtype,
    shapes: list[Shape],
    new_kernel: NewKernel = in_triton,
) -> Iterator[Comparison]:
    for shape in shapes:
        steps = dict(STEPS) if shape.window else {**STEPS, "shared": []}
        for name, step in steps.items():
            compare = partial(_difference, device, dtype, shape, step, new_kernel)
            yield f"{name}: {shape}", compare
            if name in ("decode", "shared"):
                yield f"{name}, as a graph has it: {shape}", partial(compare, is_graph=True)


def _difference(
    device: torch.device,
    dtype: torch.dtype,
    shape: Shape,
    step: list[tuple[int, int]],
    new_kernel: NewKernel,
    *,
    is_graph: bool = False,
) -> float:
    generator = torch.Generator().manual_seed(7)
    layout = KvLayout(
        num_layers=1, num_kv_heads=shape.kv_heads, head_dim=shape.head_dim, dtype=dtype
    )
    pool = KvPool(layout, NUM_BLOCKS, shape.block_size, device)
    for tensor in (*pool.keys, *pool.values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator))
    works = _works(step, shape.block_size) if step else _shared_works(shape.block_size)
    kernel = new_kernel(layout, shape.heads)
    new_attend = _graph_attend if is_graph else _step_attend
    rows, attend = new_attend(works, shape, device, kernel)
    sinks = 2 * torch.randn(shape.heads, generator=generator).to(device)
    layer = Layer(
        index=0,
        scaling=shape.head_dim**-0.5,
        window=shape.window,
        softcap=shape.softcap,
        sinks=sinks if shape.has_sinks else None,
    )
    query = torch.randn((shape.heads, rows, shape.head_dim), generator=generator)
    query = query.to(device, dtype)
    computed = attend(query, pool, layer).float()
    expected = _plain(query.float(), works, pool, layer)
    num_rows = expected.shape[1]
    if computed[:, num_rows:].any():
        return math.inf  # a row that is no sequence's attended to something
    computed = computed[:, :num_rows]
    return float((computed - expected).abs().max() / expected.abs().max())


def _step_attend(
    works: list[Work], shape: Shape, device: torch.device, kernel: Kernel
) -> tuple[int, Attend]:
    """The rows of a step, and the function that computes their attention."""
    batch = build_batch(
        works,
        shape.block_size,
        device,
        share=shape.window is None,
        tile_rows=kernel.tile_rows,
    )
    assert batch.tiles is not None
    return len(batch.token_ids), kernel.step(batch.tiles, batch.positions)


def _graph_attend(
    works: list[Work], shape: Shape, device: torch.device, kernel: Kernel
) -> tuple[int, Attend]:
    """The same in a graph's memory, which has room for more rows and tiles."""
    sizes = GraphSizes(len(works) + 3, 4096, split_tokens(shape.block_size))
    packed = pack(works, shape.block_size)
    tiles = packed.cut(kernel.tile_rows, share=shape.window is None)
    size = sizes.fitting(len(works) + 1, tiles.num_parts, draws=False)
    buffers = StepBuffers(
        size.rows,
        size.parts,
        blocks_a_part=sizes.split // shape.block_size,
        scratch_slot=0,
        vocabulary=2,
        device=device,
    )
    buffers.send(size, packed, tiles, [GREEDY] * len(works), [0] * len(works))
    return size.rows, kernel.over(buffers.placed(size))


def _works(step: list[tuple[int, int]], block_size: int) -> list[Work]:
    rng = np.random.default_rng(1)
    works = []
    for start, count in step:
        num_blocks = math.ceil((start + count) / block_size)
        table = rng.permutation(NUM_BLOCKS)[:num_blocks].tolist()
        works.append(Work(token_ids=[1] * count, start=start, block_table=table, sample=GREEDY))
    return works


def _shared_works(block_size: int) -> list[Work]:
    """Decoding sequences behind the same 640 tokens, with tails of other lengths, and one alone."""
    rng = np.random.default_rng(2)
    order = rng.permutation(NUM_BLOCKS).tolist()
    shared = 640 // block_size
    works = []
    for index in range(7):
        start = shared * block_size + 5 * index
        tail = order[shared + 8 * index : shared + 8 * (index + 1)]
        table = [*order[:shared], *tail]
        works.append(Work(token_ids=[1], start=start, block_table=table, sample=GREEDY))
    return [*works, Work(token_ids=[1], start=90, block_table=order[::-1], sample=GREEDY)]


def _plain(query: torch.Tensor, works: list[Work], pool: KvPool, layer: Layer) -> torch.Tensor:
    """Attention in float32 over a whole matrix of scores for each sequence."""
    outputs = []
    begin = 0
    group_size = len(query) // pool.layout.num_kv_heads
    for work in works:
        rows = slice(begin, begin + len(work.token_ids))
        begin = rows.stop
        end = work.start + len(work.token_ids)
        blocks = torch.tensor(work.block_table, device=query.device)
        keys, values = (
            tensor[0][blocks]
            .flatten(0, 1)[:end]
            .float()
            .transpose(0, 1)
            .repeat_interleave(group_size, 0)
            for tensor in (pool.keys, pool.values)
        )
        scores = (query[:, rows] @ keys.transpose(1, 2)) * layer.scaling
        if layer.softcap is not None:
            scores = layer.softcap * torch.tanh(scores / layer.softcap)
        places = torch.arange(end, device=query.device)
        mask = visible(places[work.start :, None], places[None], layer.window)
        scores = scores.masked_fill(~mask, float("-inf"))
        if layer.sinks is not None:
            sinks = layer.sinks[:, None, None].expand(-1, scores.shape[1], 1)
            scores = torch.cat([scores, sinks], -1)
        outputs.append(torch.softmax(scores, -1)[..., :end] @ values)
    return torch.cat(outputs, 1)
