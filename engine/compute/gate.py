"""How far approximate answers are from exact ones, on texts of the model's own.

Measured at the load, before anybody is served: the model writes a few texts, the beginning of each
is compressed, or two parts of it are computed apart and placed elsewhere. The rest is computed
behind that and behind the whole.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from engine.approximate.copying import Blend, Move
from engine.approximate.kinds import Compression
from engine.cache.ids import BlockId, TokenId
from engine.compute.compress import KvCompressor, Told
from engine.compute.loading import LoadedModel
from engine.compute.place import Turns
from engine.compute.runner import TorchRunner
from engine.protocol import LEAST_KEEP, SCORERS, Document, Method
from engine.protocol.reports import Technique
from engine.schedule.runner import SampleParams, Work
from engine.sizing import aligned

MAX_KL = 0.5
"""Nats. Beyond it, or below the agreement, a technique is refused."""
MIN_AGREEMENT = 0.7
KEEPS = (0.75, 0.5, 0.25, LEAST_KEEP)
RECOMPUTES = (0, 4, 16, 32, 0.05, 0.15, 0.3)
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


def measure(loaded: LoadedModel, told: Told, turns: Turns | None) -> Iterator[Technique]:
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
    begin = loaded.model.config.bos_token_id
    for text in texts:
        text.tokens.append(TokenId(begin if isinstance(begin, int) else 0))
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
            kept = aligned(int(prefix * keep), _BLOCK_SIZE)
            how = Compression(scorer, keep, prefix, kept)
            found = []
            for text in texts:
                move = Move([(0, kept)], text.blocks, text.spare)
                for _ in compressor.compress(how, text.tokens, move):
                    pass
                found.append(behind(text, text.spare, kept))
            yield compared(scorer, keep, exact, found)
    if turns is None:
        return
    half = prefix * 5 // 8
    spans = [(prefix // 4, half), (half, prefix)]
    tables = [[text.blocks[: size // 2], text.blocks[size // 2 :]] for text in texts]
    for text, apart in zip(texts, tables, strict=True):
        # The exact texts are measured: their blocks may be written to.
        compute_apart(runner, text.tokens, spans, apart)
    for recompute in RECOMPUTES:
        found = []
        for text, apart in zip(texts, tables, strict=True):
            stand(runner, compressor, text.tokens, spans, apart, text.spare, recompute)
            found.append(behind(text, text.spare, prefix))
        yield compared("blocks", recompute, exact, found)


def compute_apart(
    runner: TorchRunner,
    tokens: Sequence[TokenId],
    spans: Sequence[tuple[int, int]],
    apart: Sequence[Sequence[int]],
) -> None:
    """Compute documents at these spans of a prompt by themselves, each in its own table."""
    for (start, end), blocks in zip(spans, apart, strict=True):
        alone = [tokens[0], *tokens[start:end]]
        runner.execute([Work(token_ids=alone, start=0, block_table=blocks)])


def stand(
    runner: TorchRunner,
    compressor: KvCompressor,
    tokens: Sequence[TokenId],
    spans: Sequence[tuple[int, int]],
    apart: Sequence[Sequence[int]],
    targets: Sequence[int],
    recompute: int | float,
) -> None:
    """Compute a prompt up to its last document's end, with documents copied to where they stand."""
    asked = Document(0, recompute=recompute)
    documents = list[Blend]()
    for (start, end), blocks in zip(spans, apart, strict=True):
        num = min(asked.num_recomputed(end - start), end - start)
        documents.append(Blend(start, end, num, blocks, []))
    end = spans[-1][1]
    copied = set[int]()
    if isinstance(recompute, float):
        for _ in compressor.choose(tokens, [(0, end)], documents, targets):
            pass
    for one in documents:
        again = one.chosen or range(one.start, one.start + one.num)
        move = Move([(one.start, one.end)], one.blocks, targets)
        for _ in compressor.place(one.start - 1, move):
            pass
        copied.update(set(range(one.start, one.end)).difference(again))
    works = list[Work]()
    position = 0
    while position < end:
        stop = next((place for place in range(position, end) if place in copied), end)
        if own := tokens[position:stop]:
            works.append(Work(token_ids=own, start=position, block_table=targets))
        position = stop + 1
    runner.execute(works)


def compared(
    method: Method, parameter: int | float, exact: list[torch.Tensor], found: list[torch.Tensor]
) -> Technique:
    """By log-probabilities (tokens, vocabulary) of each text."""
    right = torch.cat(exact)
    other = torch.cat(found)
    kl = float((right.exp() * (right - other)).sum(-1).mean())
    agreement = float((right.argmax(-1) == other.argmax(-1)).float().mean())
    return Technique(
        method=method,
        parameter=parameter,
        kl=kl,
        agreement=agreement,
        tokens=len(right),
        is_allowed=kl <= MAX_KL and agreement >= MIN_AGREEMENT,
    )
