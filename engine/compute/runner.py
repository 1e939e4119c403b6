"""The model behind the scheduler: one step in, the next tokens out."""

from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.cache.ids import BlockId, TokenId
from engine.compute.attention.step import STEP_ARGUMENT, Attend, AttentionStep
from engine.compute.attention.tiles import Tiles
from engine.compute.batch import build_batch
from engine.compute.errors import StepStopped
from engine.compute.kv import HostKv, KvPool
from engine.compute.sampler import biased, sample, tell_probs
from engine.schedule.runner import SampleParams, Stop, Work


class Kernel(Protocol):
    """The paged kernel (`engine.compute.attention.kernel.PagedKernel`)."""

    tile_rows: int

    def step(self, tiles: Tiles, positions: torch.Tensor) -> Attend: ...


class TorchRunner:
    """An `engine.schedule.runner.Runner` over a transformers model and a KV pool.

    `windows` are the layers' sliding windows (`engine.compute.support.layer_windows`). `kernel`
    None attends by torch's own functions.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        pool: KvPool,
        windows: Sequence[int | None],
        host: HostKv,
        kernel: Kernel | None = None,
    ) -> None:
        self._kernel = kernel
        self.pool = pool
        self.host = host
        self._model = model
        self._windows = windows

    def execute(
        self, works: Sequence[Work], stop: Stop | None = None
    ) -> list[TokenId | None] | None:
        try:
            rows = iter(self.visit(works, stop)[0])
        except StepStopped:
            return None
        tokens: list[TokenId | None] = []
        for work in works:
            tokens.append(None if work.sample is None else _draw(work, work.sample, rows))
        return tokens

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self.pool.copy_blocks(pairs)

    def demote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self.host.demote(pairs)

    def promote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        self.host.promote(pairs)

    def save(self, blocks: Sequence[BlockId]) -> list[bytes]:
        return self.pool.save(blocks)

    def load(self, loads: Sequence[tuple[bytes, BlockId]]) -> None:
        self.pool.load(loads)

    def logits(self, works: Sequence[Work]) -> torch.Tensor:
        """Compute a step; the logits (draws, vocabulary), work by work."""
        return self.visit(works)[0]

    @torch.inference_mode()
    def visit(
        self, works: Sequence[Work], stop: Stop | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Compute a step; its logits, and the layers whose attention ran, in order.

        Raises StepStopped, before a layer, where `stop` says so.
        """
        batch = build_batch(
            works,
            self.pool.block_size,
            self.pool.device,
            share=not any(self._windows),
            tile_rows=None if self._kernel is None else self._kernel.tile_rows,
        )
        attend = None
        if self._kernel is not None and batch.tiles is not None:
            attend = self._kernel.step(batch.tiles, batch.positions)
        step = AttentionStep(
            pool=self.pool, batch=batch, windows=self._windows, stop=stop, attend=attend
        )
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.sampled,
            **{STEP_ARGUMENT: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits, step.visited


def _draw(work: Work, params: SampleParams, rows: Iterator[torch.Tensor]) -> TokenId:
    """Take the work's rows of logits; draw its token, and those behind the proposed ones drawn."""
    position = work.start + len(work.token_ids) - len(work.drafts)
    row = next(rows)
    first = token = sample(biased(row, work.bias), params, position, work.allowed)
    if work.probs is not None:
        tell_probs(row, token, work.probs)
    is_right = True
    for proposed, draft in zip(work.proposed, work.drafts, strict=True):
        row, position = next(rows), position + 1
        is_right = is_right and token == proposed
        if is_right:
            token = sample(biased(row, draft.bias), params, position, draft.allowed)
            draft.token = token
            if draft.probs is not None:
                tell_probs(row, token, draft.probs)
    return first
