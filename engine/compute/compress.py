"""Copies keys and values from one prompt to another in the KV pool, in bounded parts.

`engine.approximate.copying.Compressor` says what is copied when.
"""

import math
from collections.abc import Iterator, Sequence

import torch

from engine.approximate.copying import Blend, Move
from engine.approximate.kinds import Compression
from engine.cache.ids import TokenId
from engine.compute.attention.replay import Replay
from engine.compute.errors import ModelRefused
from engine.compute.loading import LoadedModel
from engine.compute.place import Turns
from engine.compute.runner import TorchRunner
from engine.compute.scorers import (
    SCORE_ATTENDED,
    SCORE_KEYS,
    SINKS,
    WINDOW,
    Instructions,
    choose,
    pieces,
)
from engine.protocol import Scorer
from engine.schedule.runner import Work
from engine.sizing import blocks_for

CHECKED_LAYER = 1
"""The layer in which the values of copied tokens are compared with computed values."""
_TOKENS_A_COST = 256
"""Reading or copying so many tokens of one layer is charged as one token of prefill."""
_COPIED_TOKENS = 4096
"""The most tokens of one layer that are copied at once."""
_STEP_TOKENS = 128
"""The most tokens that run over a prefix in one step."""
_STEP_BYTES = 2**28
"""The most bytes of attention scores in such a step. Behind a long prefix a step has fewer
tokens."""

Scores = dict[int, torch.Tensor]
"""By layer (heads, tokens): how much each head needs each token of a prefix."""


class KvCompressor:
    """A `Compressor` over a runner's pool. Without `turns` it can't place documents."""

    def __init__(
        self, runner: TorchRunner, instructions: Instructions, turns: Turns | None = None
    ) -> None:
        self._runner = runner
        self._instructions = instructions
        self.turns = turns

    @torch.inference_mode()
    def compress(
        self, compression: Compression, tokens: Sequence[TokenId], move: Move
    ) -> Iterator[int]:
        pool = self._runner.pool
        scorer = compression.scorer
        num_tokens = compression.of
        prefix = tokens[:num_tokens]
        num_blocks = blocks_for(num_tokens, pool.block_size)
        blocks = torch.tensor(move.sources[:num_blocks], device=pool.device)
        slots = pool.slots(blocks)[:num_tokens]
        targets = self._slots(move.targets)
        scores: Scores = {}
        if scorer == "kvzip":
            yield from self._score_repetition(prefix, blocks, scores)
        elif scorer in SCORE_ATTENDED:
            yield from self._score_attended(scorer, prefix, blocks, scores)
        for layer in range(pool.layout.num_layers):
            if scorer in SCORE_KEYS:
                keys = pool.gather(layer, blocks)[0][:num_tokens].transpose(0, 1)
                scores[layer] = SCORE_KEYS[scorer](keys.float(), compression.kept)
            kept = slots[choose(scores.pop(layer), compression.kept)]
            for start, end in move.ranges:
                pool.copy_slots(layer, kept[start:end], targets[start:end])
            # Without the wait this time would count as the next step's, and the pace is learned
            # from steps.
            pool.wait()
            yield num_tokens // _TOKENS_A_COST

    def _score_repetition(
        self, prefix: Sequence[TokenId], blocks: torch.Tensor, scores: Scores
    ) -> Iterator[int]:
        """Score each layer by what the model attends to while it repeats the prefix."""
        num_tokens = len(prefix)
        for columns, repetition in pieces(prefix, self._instructions):
            num_sinks = min(SINKS, columns.start)
            replay = Replay(self._runner.pool, blocks, num_tokens, columns, num_sinks)
            yield from self._run(repetition, num_tokens, replay)
            for layer, attended in replay.noted.items():
                # A token that one head needs is needed by the layer.
                most = attended.amax(0, keepdim=True)
                before = scores.get(layer, most[:, :0])
                scores[layer] = torch.cat([before, most], 1)

    def _score_attended(
        self, scorer: Scorer, prefix: Sequence[TokenId], blocks: torch.Tensor, scores: Scores
    ) -> Iterator[int]:
        """Score each layer by what the prefix's own tokens attend to."""
        num_tokens = len(prefix)
        replay = Replay(self._runner.pool, blocks, num_tokens, range(num_tokens), is_own=True)
        start = max(num_tokens - WINDOW, 0) if scorer == "snapkv" else 0
        yield from self._run(prefix[start:], start, replay)
        for layer, attended in replay.noted.items():
            scores[layer] = SCORE_ATTENDED[scorer](attended)

    @torch.inference_mode()
    def choose(
        self,
        tokens: Sequence[TokenId],
        gaps: Sequence[tuple[int, int]],
        documents: Sequence[Blend],
        targets: Sequence[int],
    ) -> Iterator[int]:
        """CacheBlend (arXiv 2405.16444, section 4.3): the first layer is computed for all tokens.

        A token's deviation is |v - v_copied|^2 in the next layer, summed over all heads. The tokens
        that deviate most are computed in all layers. They attend to the copies of the other tokens.
        LMCache compares keys. Values are compared here, because values are not turned.
        """
        pool = self._runner.pool
        target_slots = self._slots(targets)
        layer = min(CHECKED_LAYER, pool.layout.num_layers - 1)
        for start, stop in _parts(gaps, _STEP_TOKENS):
            work = Work(token_ids=tokens[start:stop], start=start, block_table=targets)
            self._runner.write_layers([work], layer + 1)
            pool.wait()
            yield math.ceil((stop - start) / pool.layout.num_layers)
        values = pool.values[layer].flatten(0, 1)
        for document in documents:
            # A document that is computed by itself has one token in front of it.
            source_slots = self._slots(document.blocks)[1:]
            deviations = list[torch.Tensor]()
            for start, stop in _parts([(document.start, document.end)], _COPIED_TOKENS):
                source = source_slots[start - document.start : stop - document.start]
                difference = values[target_slots[start:stop]].float() - values[source].float()
                deviations.append(difference.square().sum((1, 2)))
                yield (stop - start) // _TOKENS_A_COST
            most = torch.cat(deviations).topk(document.num).indices.sort().values
            document.chosen.extend((most + document.start).tolist())

    @torch.inference_mode()
    def place(self, shift: int, move: Move) -> Iterator[int]:
        pool = self._runner.pool
        turns = self.turns
        assert turns is not None
        sources = self._slots(move.sources)
        targets = self._slots(move.targets)
        for start, stop in _parts(move.ranges, _COPIED_TOKENS):
            for layer in range(pool.layout.num_layers):
                style = turns.styles[layer]
                slots = targets[start:stop]
                pool.copy_slots(layer, sources[start - shift : stop - shift], slots)
                if style != "none" and shift:
                    keys = pool.keys[layer].flatten(0, 1)
                    keys[slots] = turns.turned(keys[slots], shift, style)
                pool.wait()
                yield (stop - start) // _TOKENS_A_COST

    @torch.inference_mode()
    def take_over(self, own_layers: int, tokens: Sequence[TokenId], move: Move) -> Iterator[int]:
        pool = self._runner.pool
        num_layers = pool.layout.num_layers
        sources = self._slots(move.sources)
        targets = self._slots(move.targets)
        # A part takes about as long as a step of the whole model.
        part = min(_STEP_TOKENS * num_layers // max(own_layers, 1), _COPIED_TOKENS)
        for start, stop in _parts(move.ranges, part):
            for layer in range(own_layers, num_layers):
                pool.copy_slots(layer, sources[start:stop], targets[start:stop])
            work = Work(token_ids=tokens[start:stop], start=start, block_table=move.targets)
            self._runner.write_layers([work], own_layers)
            pool.wait()
            num_tokens = stop - start
            yield num_tokens * own_layers // num_layers + num_tokens // _TOKENS_A_COST

    def _slots(self, blocks: Sequence[int]) -> torch.Tensor:
        return self._runner.pool.slots(torch.tensor(blocks, device=self._runner.pool.device))

    def _run(self, tokens: Sequence[TokenId], start: int, replay: Replay) -> Iterator[int]:
        """Compute tokens at positions from `start` on. `replay` notes what they attend to."""
        num_bytes = 4 * self._runner.num_heads * (replay.num_tokens + len(tokens))
        step = min(max(_STEP_BYTES // num_bytes, 1), _STEP_TOKENS)
        for begin in range(0, len(tokens), step):
            step_tokens = tokens[begin : begin + step]
            self._runner.replay(step_tokens, start + begin, replay)
            self._runner.pool.wait()
            yield len(step_tokens)


def _parts(ranges: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    """The ranges, cut into parts of at most `most` tokens."""
    for start, end in ranges:
        for begin in range(start, end, most):
            yield begin, min(begin + most, end)


def check_compressible(loaded: LoadedModel) -> None:
    """Raise ModelRefused for a model whose keys and values can't be copied in this way."""
    layout = loaded.layout
    softcap = getattr(loaded.model.config, "attn_logit_softcapping", None)
    traits = (
        (bool(layout.state_parts), "layers with a recurrent state"),
        (layout.latent_rank is not None, "latent attention"),
        (any(loaded.windows), "sliding windows"),
        (layout.num_layers < len(layout.place_of), "layers that share keys and values"),
        (layout.codec is not None, "ENGINE_KV_DTYPE"),
        (bool(softcap), "capped attention scores"),
    )
    for has_trait, trait in traits:
        if has_trait:
            raise ModelRefused(f"ENGINE_APPROXIMATE: not with {trait}")
