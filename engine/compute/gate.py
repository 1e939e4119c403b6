"""How far approximate answers are from exact ones, on texts of the model's own.

Measured at the load, before anybody is served: the model writes a few texts, the beginning of each
is compressed, or its two halves are computed apart and placed. The rest is computed behind that and
behind the whole.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TypedDict

import torch

from engine.cache.compression import Compression
from engine.cache.ids import BlockId, TokenId
from engine.compute.compress import KvCompressor, Told
from engine.compute.loading import LoadedModel
from engine.compute.place import Turns
from engine.protocol import LEAST_KEEP, SCORERS
from engine.protocol.reports import Placement, Technique
from engine.schedule.runner import SampleParams, Work

MAX_KL = 0.5
"""Nats. Beyond it, or below the agreement, a technique is refused."""
MIN_AGREEMENT = 0.7
KEEPS = (0.75, 0.5, 0.25, LEAST_KEEP)
RECOMPUTES = (0, 4, 16, 32)
NUM_TEXTS = 4
PREFIX_TOKENS = 256
REST_TOKENS = 64
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Text:
    """`blocks` hold the beginning of the text, `spare` are free."""

    tokens: list[TokenId]
    blocks: list[BlockId]
    spare: list[BlockId]


def measure(
    loaded: LoadedModel, told: Told, turns: Turns | None
) -> Iterator[Technique | Placement]:
    """All techniques, one after the other. The memory is taken for this alone."""
    prefix = min(PREFIX_TOKENS, loaded.max_context_tokens // 2) // _BLOCK_SIZE * _BLOCK_SIZE
    rest = min(REST_TOKENS, prefix)
    size = (prefix + rest) // _BLOCK_SIZE + 1
    runner = loaded.runner(2 * size * NUM_TEXTS, _BLOCK_SIZE)
    compressor = KvCompressor(runner, told, turns)
    texts = [
        _Text([], [*range(begin, begin + size)], [*range(begin + size, begin + 2 * size)])
        for begin in map(BlockId, range(0, 2 * size * NUM_TEXTS, 2 * size))
    ]
    first = _first_token(loaded)
    for text in texts:
        text.tokens.append(first)
    for place in range(prefix + rest - 1):
        drawn = runner.execute(
            [
                Work(
                    token_ids=text.tokens[-1:],
                    start=place,
                    block_table=text.blocks,
                    sample=SampleParams(temperature=1, top_p=1, top_k=0, seed=seed),
                )
                for seed, text in enumerate(texts)
            ]
        )
        for text, token in zip(texts, drawn, strict=True):
            assert token is not None
            text.tokens.append(token)

    def behind(text: _Text, blocks: list[BlockId], start: int) -> torch.Tensor:
        """The log-probabilities (rest, vocabulary) behind each token of the rest."""
        own = text.tokens[prefix:]
        greedy = SampleParams(temperature=0, top_p=1, top_k=0, seed=0)
        cut = prefix - start
        work = Work(
            token_ids=own, start=start, block_table=blocks, sample=greedy, draft=own[1:], cut=cut
        )
        return runner.logits([work]).float().log_softmax(-1)

    exact = [behind(text, text.blocks, prefix) for text in texts]
    for scorer in SCORERS:
        for keep in KEEPS:
            kept = -(-int(prefix * keep) // _BLOCK_SIZE) * _BLOCK_SIZE
            how = Compression(scorer, keep, prefix, kept)
            found = []
            for text in texts:
                targets = text.spare[: kept // _BLOCK_SIZE]
                for _ in compressor.compress(how, text.tokens, text.blocks, targets):
                    pass
                found.append(behind(text, text.spare, kept))
            far = _compared(torch.cat(exact), torch.cat(found))
            yield Technique(scorer=scorer, keep=keep, **far)
    for recompute in RECOMPUTES if turns is not None else ():
        found = []
        for text in texts:
            # The exact texts are measured: their blocks may be written to.
            for start, end in ((1, prefix // 2), (prefix // 2, prefix)):
                alone = [text.tokens[0], *text.tokens[start:end]]
                runner.execute([Work(token_ids=alone, start=0, block_table=text.blocks)])
                copied = min(start + recompute, end)
                ranges = [(copied, end)]
                for _ in compressor.place(start - 1, ranges, text.blocks, text.spare):
                    pass
            for start, end in ((0, 1 + recompute), (prefix // 2, prefix // 2 + recompute)):
                if again := text.tokens[start : min(end, prefix)]:
                    runner.execute([Work(token_ids=again, start=start, block_table=text.spare)])
            found.append(behind(text, text.spare, prefix))
        far = _compared(torch.cat(exact), torch.cat(found))
        yield Placement(recompute=recompute, **far)


class _Far(TypedDict):
    kl: float
    agreement: float
    tokens: int
    is_allowed: bool


def _compared(exact: torch.Tensor, found: torch.Tensor) -> _Far:
    kl = float((exact.exp() * (exact - found)).sum(-1).mean())
    agreement = float((exact.argmax(-1) == found.argmax(-1)).float().mean())
    is_allowed = kl <= MAX_KL and agreement >= MIN_AGREEMENT
    return _Far(kl=kl, agreement=agreement, tokens=len(exact), is_allowed=is_allowed)


def _first_token(loaded: LoadedModel) -> TokenId:
    """What texts begin with: the model's own token for it, else its first."""
    begin = loaded.model.config.bos_token_id
    return TokenId(begin if isinstance(begin, int) else 0)
