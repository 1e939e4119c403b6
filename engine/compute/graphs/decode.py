"""A runner's decode steps as graphs. There is one graph for each size, over one static memory."""

from collections.abc import Callable, Sequence

import torch

from engine.cache.ids import TokenId
from engine.compute.attention.placed import PlacedTiles
from engine.compute.batch import Batch, pack
from engine.compute.errors import ModelRefused
from engine.compute.graphs.buffers import Mirrored, StepBuffers
from engine.compute.graphs.capture import Capture, Launch
from engine.compute.graphs.rule import GraphSize, GraphSizes, why_plain
from engine.compute.kv import KvPool
from engine.compute.sampler import HEAD, draw, is_greedy, rows_at_a_time, sample_rows
from engine.schedule.runner import Work

Forward = Callable[[Batch, PlacedTiles], torch.Tensor]
"""Computes a packed row over tiles. The result is the logits (rows, vocabulary)."""


class DecodeGraphs:
    """The graphs of one runner. They are used from one thread.

    `tile_rows` is the kernel's. `share` is as in `PackedStep.cut`.
    """

    def __init__(
        self,
        forward: Forward,
        pool: KvPool,
        sizes: GraphSizes,
        *,
        vocabulary: int,
        tile_rows: int,
        share: bool,
    ) -> None:
        """The pool must have a scratch block."""
        assert pool.scratch_block is not None
        self._forward = forward
        self._sizes = sizes
        self._block_size = pool.block_size
        self._tile_rows = tile_rows
        self._share = share
        most_rows = sizes.rows[-1]
        self._vocabulary = vocabulary
        self.buffers = StepBuffers(
            most_rows,
            sizes.most_parts(most_rows),
            blocks_a_part=sizes.split // pool.block_size,
            scratch_slot=pool.scratch_block * pool.block_size,
            vocabulary=vocabulary,
            device=pool.device,
        )
        # For each row the drawn token, and whether the likeliest tokens decided it.
        self.drawn = Mirrored((2, most_rows), torch.int64, pool.device)
        # The logits in 32 bits, for rows that the likeliest tokens do not decide.
        self._logits = torch.zeros((most_rows, vocabulary), device=pool.device)
        self._launches: dict[GraphSize, Launch] = {}
        self.num_launched = 0

    @torch.inference_mode()
    def capture(self, capture: Capture) -> None:
        """Capture a graph of each size. Raise ModelRefused if that can't be done."""
        for size in self._sizes.all():
            self._launches[size] = capture(self._step(size))

    @torch.inference_mode()
    def execute(self, works: Sequence[Work]) -> list[TokenId] | None:
        """Compute a step and draw a token behind each of its works.

        The result is None, and nothing is computed, if the step must go the plain way.
        """
        if why_plain(works, self._sizes) is not None:
            return None
        packed = pack(works, self._block_size)
        tiles = packed.cut(self._tile_rows, share=self._share)
        params = [work.sample for work in works if work.sample is not None]
        positions = [work.next_position for work in works]
        draws = not all(map(is_greedy, params))
        size = self._sizes.fitting(len(works), tiles.num_parts, draws=draws)
        self.buffers.send(size, packed, tiles, params, positions)
        self._launches[size]()
        self.num_launched += 1
        self.drawn.fetch()
        tokens: list[TokenId] = self.drawn.numbers[0, : len(works)].tolist()
        undecided = (self.drawn.numbers[1, : len(works)] == 0).nonzero()[0].tolist()
        if undecided:
            drawn = sample_rows(
                self._logits[undecided],
                [params[row] for row in undecided],
                [positions[row] for row in undecided],
            )
            for row, token in zip(undecided, drawn, strict=True):
                tokens[row] = token
        return tokens

    def _step(self, size: GraphSize) -> Callable[[], None]:
        batch = self.buffers.batch(size)
        placed = self.buffers.placed(size)

        def step() -> None:
            logits = self._forward(batch, placed)
            if logits.shape[-1] != self._vocabulary:
                raise ModelRefused(f"ENGINE_CUDA_GRAPHS: {logits.shape[-1]} logits of a token")
            best = logits.argmax(-1)
            tokens, is_decided = self.drawn.device[:, : size.rows]
            tokens.copy_(best)
            is_decided.fill_(1)
            if size.draws:
                self._draw(logits, tokens, is_decided)

        return step

    def _draw(self, logits: torch.Tensor, tokens: torch.Tensor, is_decided: torch.Tensor) -> None:
        """Replace the likeliest tokens by drawn tokens in rows that are not greedy."""
        num_rows = len(logits)
        self._logits[:num_rows].copy_(logits)
        width = min(HEAD, self._vocabulary)
        at_a_time = rows_at_a_time(self._vocabulary)
        for begin in range(0, num_rows, at_a_time):
            rows = slice(begin, min(begin + at_a_time, num_rows))
            drawn, decided = draw(self._logits[rows], self.buffers.columns(rows), width)
            greedy = self.buffers.greedy(rows)
            tokens[rows].copy_(torch.where(greedy, tokens[rows], drawn))
            is_decided[rows].copy_(greedy | decided)
