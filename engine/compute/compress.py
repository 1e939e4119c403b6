"""Compresses a prefix in the KV pool: in each layer the tokens worth most are copied together."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from engine.cache.compression import Compression
from engine.cache.ids import BlockId, TokenId
from engine.compute.errors import ModelRefused
from engine.compute.loading import LoadedModel
from engine.compute.place import Turns, place
from engine.compute.runner import TorchRunner
from engine.compute.scorers import SCORE_ATTENDED, SCORE_KEYS, choose
from engine.compute.scorers.kvzip import pieces
from engine.compute.scorers.replay import Replay
from engine.compute.scorers.sinks import SINKS
from engine.compute.scorers.snapkv import WINDOW
from engine.protocol import Scorer

_TOKENS_A_COST = 256
"""Reading the keys of so many tokens in one layer is charged as one token of prefill."""
_STEP_TOKENS = 128
"""Tokens that run over a prefix in one step, at most."""
_STEP_BYTES = 2**28
"""What the attention scores of such a step may take. A longer prefix gets shorter steps."""


class Told(NamedTuple):
    """What is said to a model that is to repeat its prompt (`scorers/kvzip.py`), in tokens."""

    repeat: Sequence[TokenId]
    repeat_part: Sequence[TokenId]
    turn: Sequence[TokenId]


class KvCompressor:
    """A `Compressor` over a runner's pool. Without `turns` it places nothing."""

    def __init__(self, runner: TorchRunner, told: Told, turns: Turns | None = None) -> None:
        self._runner, self._told, self.turns = runner, told, turns

    def place(
        self,
        shift: int,
        ranges: Sequence[tuple[int, int]],
        sources: Sequence[BlockId],
        targets: Sequence[BlockId],
    ) -> Iterator[int]:
        assert self.turns is not None
        yield from place(self._runner, self.turns, shift, ranges, sources, targets)

    @torch.inference_mode()
    def compress(
        self,
        how: Compression,
        tokens: Sequence[TokenId],
        sources: Sequence[BlockId],
        targets: Sequence[BlockId],
    ) -> Iterator[int]:
        pool = self._runner.pool
        blocks = torch.tensor(sources[: -(-how.of // pool.block_size)], device=pool.device)
        slots = pool.slots(blocks)[: how.of]
        into = pool.slots(torch.tensor(targets, device=pool.device))
        scores: dict[int, torch.Tensor] = {}
        if how.scorer not in SCORE_KEYS:
            yield from self._score(how.scorer, tokens[: how.of], blocks, scores)
        for layer in range(pool.layout.num_layers):
            if how.scorer in SCORE_KEYS:
                keys = pool.gather(layer, blocks)[0][: how.of].transpose(0, 1)
                scores[layer] = SCORE_KEYS[how.scorer](keys.float(), how.kept)
            pool.copy_slots(layer, slots[choose(scores.pop(layer), how.kept)], into)
            pool.wait()  # else the next step's time, by which its pace is learned, would have it
            yield how.of // _TOKENS_A_COST

    def _score(
        self,
        scorer: Scorer,
        tokens: Sequence[TokenId],
        blocks: torch.Tensor,
        scores: dict[int, torch.Tensor],
    ) -> Iterator[int]:
        """Fill the `scores` of all layers by running tokens over the prefix."""
        num, pool = len(tokens), self._runner.pool
        if scorer == "kvzip":
            for columns, behind in pieces(tokens, *self._told):
                sinks = min(SINKS, columns.start)
                replay = Replay(pool, blocks, num, columns, sinks)
                yield from self._run(behind, num, replay)
                for layer, found in replay.noted.items():
                    # A token that one head needs is needed by the layer.
                    most = found.amax(0, keepdim=True)
                    scores[layer] = torch.cat([scores.get(layer, most[:, :0]), most], 1)
            return
        replay = Replay(pool, blocks, num, range(num), is_own=True)
        begin = max(num - WINDOW, 0) if scorer == "snapkv" else 0
        yield from self._run(tokens[begin:], begin, replay)
        for layer, found in replay.noted.items():
            scores[layer] = SCORE_ATTENDED[scorer](found)

    def _run(self, tokens: Sequence[TokenId], start: int, replay: Replay) -> Iterator[int]:
        num_bytes = 4 * self._runner.num_heads * (replay.num_tokens + len(tokens))
        step = min(max(_STEP_BYTES // num_bytes, 1), _STEP_TOKENS)
        for begin in range(0, len(tokens), step):
            some = tokens[begin : begin + step]
            self._runner.replay(some, start + begin, replay)
            self._runner.pool.wait()
            yield len(some)


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
