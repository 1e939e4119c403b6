"""The model behind the scheduler. It takes a step's works and returns their next tokens."""

from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Protocol

import torch
from transformers import PreTrainedModel

from engine.cache.ids import TokenId
from engine.compute.adapters import Adapters
from engine.compute.attention.placed import PlacedTiles
from engine.compute.attention.replay import Replay
from engine.compute.attention.step import (
    STEP_ARGUMENT,
    Attend,
    AttentionStep,
    DepthReached,
    LatentCache,
)
from engine.compute.attention.tiles import Tiles
from engine.compute.batch import Batch, build_batch
from engine.compute.graphs.capture import Capture
from engine.compute.graphs.decode import DecodeGraphs
from engine.compute.graphs.rule import GraphSizes
from engine.compute.kv import HostKv, KvPool
from engine.compute.linear import PackedCache, StepStates
from engine.compute.sampler import biased, is_greedy, penalized, sample, sample_rows, tell_probs
from engine.schedule.runner import SampleParams, Work


class Kernel(Protocol):
    """A paged kernel (`engine.compute.attention.kernel`, `engine.compute.attention.cpu_kernel`)."""

    # The most rows of a wide tile, for `tiles.cut`.
    tile_rows: int

    @property
    def name(self) -> str:
        """The name that `Description.attention` has."""
        ...

    def step(self, tiles: Tiles, positions: torch.Tensor) -> Attend:
        """The attention function of one step. `positions` (rows) are those of its tokens."""
        ...

    def over(self, placed: PlacedTiles) -> Attend:
        """The attention function over these tiles. It reads them anew at each call."""
        ...


def _draw_plain(
    logits: torch.Tensor, drawing: Sequence[tuple[int, SampleParams, Work]]
) -> dict[int, TokenId]:
    """Draw at once for the first rows of works that have neither a grammar nor a bias.

    `logits` are (rows, vocabulary). The result has the tokens by row. Greedy rows are left out.
    """
    rows: list[int] = []
    params_of_rows: list[SampleParams] = []
    positions: list[int] = []
    for row, params, work in drawing:
        if is_greedy(params) or work.allowed is not None or work.bias:
            continue
        rows.append(row)
        params_of_rows.append(params)
        positions.append(work.next_position)
    if not rows:
        return {}
    row_logits = logits if len(rows) == len(logits) else logits[rows]
    return dict(zip(rows, sample_rows(row_logits, params_of_rows, positions), strict=True))


class TorchRunner:
    """An `engine.schedule.runner.Runner` over a transformers model and a KV pool.

    `windows` are the layers' sliding windows (`engine.compute.loading.layer_windows`). Without a
    `kernel` torch's own functions attend.
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
        # A window hides keys of a shared prefix from some sequences only. So such a prefix can't be
        # one tile for all of them.
        self._shares = not any(windows)
        self.num_heads: int = model.config.get_text_config().num_attention_heads
        self.adapters = Adapters(model)
        # None: every step goes the plain way.
        self.graphs: DecodeGraphs | None = None
        self.copy_blocks = pool.copy_blocks
        self.clear_blocks = pool.clear_blocks
        self.clear_from = pool.clear_from
        self.clear_host = host.clear_from
        self.demote = host.demote
        self.promote = host.promote
        self.save = pool.save
        self.load = pool.load

    def capture_decodes(self, sizes: GraphSizes, capture: Capture) -> None:
        """Capture decode steps of these sizes. Raise ModelRefused if they can't be captured.

        There must be a kernel and a scratch block of the pool, and no recurrent state.
        """
        kernel = self._kernel
        assert kernel is not None

        def forward(batch: Batch, placed: PlacedTiles) -> torch.Tensor:
            step = AttentionStep(
                pool=self.pool, batch=batch, windows=self._windows, attend=kernel.over(placed)
            )
            return self._forward(batch, step)

        self.graphs = DecodeGraphs(
            forward,
            self.pool,
            sizes,
            vocabulary=self._model.config.get_text_config().vocab_size,
            tile_rows=kernel.tile_rows,
            share=self._shares,
        )
        self.graphs.capture(capture)

    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        if self.graphs is not None:
            launched = self.graphs.execute(works)
            if launched is not None:
                return list(launched)
        model_logits = self.logits(works)
        if all(work.sample is None for work in works):
            # The caller times the step. Without a draw nothing else would wait for the device.
            self.pool.wait()
        counts = (0 if work.sample is None else 1 + len(work.draft) for work in works)
        firsts = list(accumulate(counts, initial=0))
        drawing = [
            (row, work.sample, work)
            for row, work in zip(firsts, works, strict=False)
            if work.sample is not None
        ]
        # A work with a repetition penalty has no draft, so it has no other rows.
        logits = penalized(
            model_logits,
            {
                row: (work.seen, params.repetition_penalty)
                for row, params, work in drawing
                if work.seen is not None
            },
        )
        has_greedy = any(is_greedy(params) for _, params, _ in drawing)
        best: list[TokenId] = logits.argmax(-1).tolist() if has_greedy else []
        token_of = _draw_plain(logits, drawing)

        def draw(row: int, params: SampleParams, position: int, work: Work) -> TokenId:
            if is_greedy(params) and work.allowed is None and not work.bias:
                token = best[row]
            elif row in token_of:
                token = token_of[row]
            else:
                token = sample(biased(logits[row], work.bias), params, position, work.allowed)
            if work.probs is not None:
                tell_probs(model_logits[row], token, work.probs)
            return token

        tokens: list[TokenId | None] = [None] * len(works)
        for index, (row, work) in enumerate(zip(firsts, works, strict=False)):
            if work.sample is None:
                continue
            token = draw(row, work.sample, work.next_position, work)
            tokens[index] = token
            # A further token is drawn behind each proposed token that was right.
            for place, proposed in enumerate(work.draft, 1):
                if token != proposed:
                    break
                token = draw(row + place, work.sample, work.next_position + place, work)
                work.behind.append(token)
        return tokens

    def logits(self, works: Sequence[Work]) -> torch.Tensor:
        """Compute a step. Return the logits (draws, vocabulary), in the order of the works."""
        return self.visit(works)[0]

    @torch.inference_mode()
    def replay(self, token_ids: Sequence[TokenId], start: int, replay: Replay) -> None:
        """Run tokens at positions start, start + 1, … over a prefix in the pool.

        The pool is not written to.
        """
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
        """Compute and write only the keys and values of the first `depth` layers.

        The later layers' keys and values in the same slots do not change. Several works may be of
        one sequence.
        """
        if depth:
            with suppress(DepthReached):
                self.visit(works, depth)

    @torch.inference_mode()
    def visit(
        self, works: Sequence[Work], depth: int | None = None
    ) -> tuple[torch.Tensor, list[int]]:
        """Compute a step. Return its logits and the layers whose attention ran, in order.

        Raises DepthReached once the keys and values of `depth` layers are written.
        """
        batch = build_batch(
            works,
            self.pool.block_size,
            self.pool.device,
            share=self._shares,
            tile_rows=None if self._kernel is None else self._kernel.tile_rows,
        )
        attend = None
        if self._kernel is not None and batch.tiles is not None:
            attend = self._kernel.step(batch.tiles, batch.positions)
        step = AttentionStep(
            pool=self.pool, batch=batch, windows=self._windows, attend=attend, depth=depth
        )
        states = None
        if self.pool.layout.state_parts:
            states = StepStates(works, self.pool, self._model.config.num_hidden_layers)
        with self.adapters.acting(works, self.pool.device):
            logits = self._forward(batch, step, states)
        if states is not None:
            states.keep()
        return logits, step.visited

    def _forward(
        self, batch: Batch, step: AttentionStep, states: StepStates | None = None
    ) -> torch.Tensor:
        cache = None if states is None else PackedCache(states)
        if self.pool.layout.latent_rank is not None:
            cache = LatentCache(self.pool, batch.slots, states)
        output = self._model(
            input_ids=batch.token_ids[None],
            position_ids=batch.rotary[None],
            past_key_values=cache,
            use_cache=cache is not None,
            logits_to_keep=batch.sampled,
            **{STEP_ARGUMENT: step},
        )
        logits: torch.Tensor = output.logits[0]
        return logits
