"""The model behind the scheduler: one step in, the next tokens out."""

from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.cache.ids import TokenId
from engine.compute.adapters import Adapters
from engine.compute.attention.step import (
    STEP_ARGUMENT,
    Attend,
    AttentionStep,
    DepthReached,
    LatentCache,
)
from engine.compute.attention.tiles import Tiles
from engine.compute.batch import build_batch
from engine.compute.kv import HostKv, KvPool
from engine.compute.linear import PackedCache, StepStates
from engine.compute.sampler import biased, is_greedy, penalized, sample, sample_rows, tell_probs
from engine.compute.scorers.replay import Replay
from engine.schedule.runner import SampleParams, Work


class Kernel(Protocol):
    """A paged kernel (`engine.compute.attention.kernel`, `engine.compute.attention.cpu_kernel`)."""

    tile_rows: int

    @property
    def name(self) -> str:
        """As `Description.attention` tells it."""
        ...

    def step(self, tiles: Tiles, positions: torch.Tensor) -> Attend: ...


class TorchRunner:
    """An `engine.schedule.runner.Runner` over a transformers model and a KV pool.

    `windows` are the layers' sliding windows (`engine.compute.loading.layer_windows`). `kernel`
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
        self.num_heads: int = model.config.get_text_config().num_attention_heads
        self.adapters = Adapters(model)
        self.copy_blocks, self.clear_blocks = pool.copy_blocks, pool.clear_blocks
        self.demote, self.promote = host.demote, host.promote
        self.save, self.load = pool.save, pool.load

    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        logits = self.visit(works)[0]
        if all(work.sample is None for work in works):
            # A draw waits for the device. Nothing else here does, and the caller times the step.
            self.pool.wait()
        rows, index = _Rows(logits, works), 0
        tokens: list[TokenId | None] = []
        for work in works:
            if work.sample is None:
                tokens.append(None)
                continue
            position = _first_position(work)
            token = rows.draw(index, work.sample, position, work)
            tokens.append(token)
            # Behind the proposed ones that were drawn.
            for place, proposed in enumerate(work.draft, 1):
                if token != proposed:
                    break
                token = rows.draw(index + place, work.sample, position + place, work)
                work.behind.append(token)
            index += 1 + len(work.draft)
        return tokens

    def logits(self, works: Sequence[Work]) -> torch.Tensor:
        """Compute a step; the logits (draws, vocabulary), work by work."""
        return self.visit(works)[0]

    @torch.inference_mode()
    def replay(self, token_ids: Sequence[TokenId], start: int, replay: Replay) -> None:
        """Run tokens at positions start, start + 1, … over a prefix in the pool."""
        work = Work(token_ids=token_ids, start=0, block_table=[0] * len(token_ids))
        batch = build_batch([work], self.pool.block_size, self.pool.device)
        replay.positions = batch.positions + start
        self._model(
            input_ids=batch.token_ids[None],
            position_ids=replay.positions[None],
            use_cache=False,
            logits_to_keep=1,
            **{
                STEP_ARGUMENT: AttentionStep(
                    pool=self.pool, batch=batch, windows=self._windows, replay=replay
                )
            },
        )

    def write_layers(self, works: Sequence[Work], depth: int) -> None:
        """Compute and write the keys and values of the first `depth` layers, and nothing else.

        Those that later layers have in the same slots stay. Several works may be of one sequence.
        """
        if depth:
            with suppress(DepthReached):
                self.visit(works, depth)

    @torch.inference_mode()
    def visit(
        self, works: Sequence[Work], depth: int | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Compute a step; its logits, and the layers whose attention ran, in order.

        Raises DepthReached behind the keys and values of `depth` layers.
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
            pool=self.pool, batch=batch, windows=self._windows, attend=attend, depth=depth
        )
        states, cache = None, None
        if self.pool.layout.state_parts:
            states = StepStates(works, self.pool, self._model.config.num_hidden_layers)
            cache = PackedCache(states)
        if self.pool.layout.latent_rank is not None:
            cache = LatentCache(self.pool, batch.slots, states)
        with self.adapters.acting(works, self.pool.device):
            output = self._model(
                input_ids=batch.token_ids[None],
                position_ids=batch.rotary[None],
                past_key_values=cache,
                use_cache=cache is not None,
                logits_to_keep=batch.sampled,
                **{STEP_ARGUMENT: step},
            )
        if states is not None:
            states.keep()
        logits: torch.Tensor = output.logits[0]
        return logits, step.visited


class _Rows:
    """A step's rows of logits. What can be drawn of all rows at once is.

    That is the most likely token of each row, and a token of each work's first row where neither a
    grammar nor a bias changes it.
    """

    def __init__(self, logits: torch.Tensor, works: Sequence[Work]) -> None:
        self._told = logits  # the model's own
        self._logits = logits = _penalized(logits, works)
        is_wanted = any(work.sample is not None and is_greedy(work.sample) for work in works)
        self._best: list[TokenId] = logits.argmax(-1).tolist() if is_wanted else []
        self._drawn = _draw_first(logits, works)

    def draw(self, index: int, params: SampleParams, position: int, how: Work) -> TokenId:
        """Draw the token at `position` from a row, and tell its probabilities where wanted."""
        row = self._logits[index]
        if is_greedy(params) and how.allowed is None and not how.bias:
            token = self._best[index]
        elif index in self._drawn:
            token = self._drawn[index]
        else:
            token = sample(biased(row, how.bias), params, position, how.allowed)
        if how.probs is not None:
            tell_probs(self._told[index], token, how.probs)
        return token


def _draw_first(logits: torch.Tensor, works: Sequence[Work]) -> dict[int, TokenId]:
    """By row, the token of each work whose draw depends on nothing but the row."""
    rows: list[int] = []
    params: list[SampleParams] = []
    positions: list[int] = []
    index = 0
    for work in works:
        if work.sample is None:
            continue
        if not (is_greedy(work.sample) or work.allowed is not None or work.bias):
            rows.append(index)
            params.append(work.sample)
            positions.append(_first_position(work))
        index += 1 + len(work.draft)
    if not rows:
        return {}
    chosen = logits if len(rows) == len(logits) else logits[rows]
    return dict(zip(rows, sample_rows(chosen, params, positions), strict=True))


def _penalized(logits: torch.Tensor, works: Sequence[Work]) -> torch.Tensor:
    """The logits with the repetition penalties; a work that has one has no draft."""
    seen: dict[int, bytearray] = {}
    penalties: dict[int, float] = {}
    index = 0
    for work in works:
        if work.sample is not None:
            if work.seen is not None:
                seen[index], penalties[index] = work.seen, work.sample.repetition_penalty
            index += 1 + len(work.draft)
    return penalized(logits, seen, penalties)


def _first_position(work: Work) -> int:
    return work.start + len(work.token_ids) - len(work.draft)
