"""Copies from one prompt to another in the KV pool: what is kept of a prefix, or a document."""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from engine.approximate.copying import Blend, Move
from engine.approximate.kinds import Compression
from engine.cache.ids import TokenId
from engine.compute.attention.replay import Replay
from engine.compute.errors import ModelRefused
from engine.compute.loading import LoadedModel
from engine.compute.place import Turns
from engine.compute.runner import TorchRunner
from engine.compute.scorers import SCORE_ATTENDED, SCORE_KEYS, SINKS, WINDOW, choose, pieces
from engine.schedule.runner import Work
from engine.sizing import blocks_for

CHECKED_LAYER = 1
"""Where values are compared with those of a document by itself."""
_TOKENS_A_COST = 256
"""Reading or copying so many tokens of one layer is charged as one token of prefill."""
_COPIED_TOKENS = 4096
"""Tokens of one layer that are copied at once."""
_STEP_TOKENS = 128
"""Tokens that run over a prefix in one step, at most."""
_STEP_BYTES = 2**28
"""What the attention scores of such a step may take. A longer prefix gets shorter steps."""


class Told(NamedTuple):
    """What is said to a model that is to repeat its prompt (`scorers.pieces`), in tokens."""

    repeat: Sequence[TokenId]
    repeat_part: Sequence[TokenId]
    turn: Sequence[TokenId]


class KvCompressor:
    """A `Compressor` over a runner's pool. Without `turns` it places nothing."""

    def __init__(self, runner: TorchRunner, told: Told, turns: Turns | None = None) -> None:
        self._runner = runner
        self._told = told
        self.turns = turns

    @torch.inference_mode()
    def compress(self, how: Compression, tokens: Sequence[TokenId], move: Move) -> Iterator[int]:
        pool = self._runner.pool
        blocks = torch.tensor(
            move.sources[: blocks_for(how.of, pool.block_size)], device=pool.device
        )
        slots = pool.slots(blocks)[: how.of]
        into = self._slots(move.targets)
        scores: dict[int, torch.Tensor] = {}
        if how.scorer == "kvzip":
            for columns, behind in pieces(tokens[: how.of], *self._told):
                replay = Replay(pool, blocks, how.of, columns, min(SINKS, columns.start))
                yield from self._run(behind, how.of, replay)
                for layer, noted in replay.noted.items():
                    # A token that one head needs is needed by the layer.
                    most = noted.amax(0, keepdim=True)
                    scores[layer] = torch.cat([scores.get(layer, most[:, :0]), most], 1)
        elif how.scorer in SCORE_ATTENDED:
            replay = Replay(pool, blocks, how.of, range(how.of), is_own=True)
            begin = max(how.of - WINDOW, 0) if how.scorer == "snapkv" else 0
            yield from self._run(tokens[begin : how.of], begin, replay)
            for layer, noted in replay.noted.items():
                scores[layer] = SCORE_ATTENDED[how.scorer](noted)
        for layer in range(pool.layout.num_layers):
            if how.scorer in SCORE_KEYS:
                keys = pool.gather(layer, blocks)[0][: how.of].transpose(0, 1)
                scores[layer] = SCORE_KEYS[how.scorer](keys.float(), how.kept)
            kept = slots[choose(scores.pop(layer), how.kept)]
            for start, end in move.ranges:
                pool.copy_slots(layer, kept[start:end], into[start:end])
            pool.wait()  # else the next step's time, by which its pace is learned, would have it
            yield how.of // _TOKENS_A_COST

    @torch.inference_mode()
    def choose(
        self,
        tokens: Sequence[TokenId],
        gaps: Sequence[tuple[int, int]],
        documents: Sequence[Blend],
        targets: Sequence[int],
    ) -> Iterator[int]:
        """CacheBlend (arXiv 2405.16444, section 4.3): the first layer is computed for all tokens.

        A token's deviation is |v - v_copied|^2 in the layer behind, over all heads. The most
        deviating ones are computed in all layers, and attend to the copies of the others. LMCache
        takes the keys; values need no turn.
        """
        pool = self._runner.pool
        own_slots = self._slots(targets)
        layer = min(CHECKED_LAYER, pool.layout.num_layers - 1)
        for start, stop in _parts(gaps, _STEP_TOKENS):
            work = Work(token_ids=tokens[start:stop], start=start, block_table=targets)
            self._runner.write_layers([work], layer + 1)
            pool.wait()
            yield math.ceil((stop - start) / pool.layout.num_layers)
        values = pool.values[layer].flatten(0, 1)
        for document in documents:
            alone = self._slots(document.blocks)
            far = list[torch.Tensor]()
            for start, stop in _parts([(document.start, document.end)], _COPIED_TOKENS):
                before = values[alone[start - document.start + 1 : stop - document.start + 1]]
                far.append(
                    (values[own_slots[start:stop]].float() - before.float()).square().sum((1, 2))
                )
                yield (stop - start) // _TOKENS_A_COST
            most = torch.cat(far).topk(document.num).indices.sort().values
            document.chosen.extend((most + document.start).tolist())

    @torch.inference_mode()
    def place(self, shift: int, move: Move) -> Iterator[int]:
        pool = self._runner.pool
        turns = self.turns
        assert turns is not None
        old = self._slots(move.sources)
        new = self._slots(move.targets)
        for start, stop in _parts(move.ranges, _COPIED_TOKENS):
            for layer in range(pool.layout.num_layers):
                style = turns.styles[layer]
                into = new[start:stop]
                pool.copy_slots(layer, old[start - shift : stop - shift], into)
                if style != "none" and shift:
                    keys = pool.keys[layer].flatten(0, 1)
                    keys[into] = turns.turned(keys[into], shift, style)
                pool.wait()
                yield (stop - start) // _TOKENS_A_COST

    @torch.inference_mode()
    def take_over(self, own_layers: int, tokens: Sequence[TokenId], move: Move) -> Iterator[int]:
        pool = self._runner.pool
        num_layers = self._runner.pool.layout.num_layers
        old = self._slots(move.sources)
        new = self._slots(move.targets)
        # A part takes about as long as a step of the whole model.
        part = min(_STEP_TOKENS * num_layers // max(own_layers, 1), _COPIED_TOKENS)
        for start, stop in _parts(move.ranges, part):
            for layer in range(own_layers, num_layers):
                pool.copy_slots(layer, old[start:stop], new[start:stop])
            work = Work(token_ids=tokens[start:stop], start=start, block_table=move.targets)
            self._runner.write_layers([work], own_layers)
            pool.wait()
            yield (stop - start) * own_layers // num_layers + (stop - start) // _TOKENS_A_COST

    def _slots(self, blocks: Sequence[int]) -> torch.Tensor:
        return self._runner.pool.slots(torch.tensor(blocks, device=self._runner.pool.device))

    def _run(self, tokens: Sequence[TokenId], start: int, replay: Replay) -> Iterator[int]:
        num_bytes = 4 * self._runner.num_heads * (replay.num_tokens + len(tokens))
        step = min(max(_STEP_BYTES // num_bytes, 1), _STEP_TOKENS)
        for begin in range(0, len(tokens), step):
            some = tokens[begin : begin + step]
            self._runner.replay(some, start + begin, replay)
            self._runner.pool.wait()
            yield len(some)


def _parts(ranges: Sequence[tuple[int, int]], most: int) -> Iterator[tuple[int, int]]:
    for start, end in ranges:
        for begin in range(start, end, most):
            yield begin, min(begin + most, end)


def check_compressible(loaded: LoadedModel) -> None:
    """Raise ModelRefused for a model whose prefixes can't be compressed so."""
    layout = loaded.layout
    for is_wrong, what in (
        (layout.state_parts, "layers with a recurrent state"),
        (layout.latent_rank is not None, "latent attention"),
        (any(loaded.windows), "sliding windows"),
        (layout.num_layers < len(layout.place_of), "layers that share keys and values"),
        (layout.codec is not None, "ENGINE_KV_DTYPE"),
        (getattr(loaded.model.config, "attn_logit_softcapping", None), "capped attention scores"),
    ):
        if is_wrong:
            raise ModelRefused(f"ENGINE_APPROXIMATE: not with {what}")
