"""Measures how far approximate answers are from exact answers, on texts of the model's own.

The model writes a few texts. The beginning of each text is made approximate: it is compressed, or
two parts of it are computed by themselves and placed in it. The rest of the text is computed behind
the approximate beginning and behind the exact one, and the two results are compared. The work is
done in bounded parts, because the model serves requests meanwhile.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from engine.approximate.copying import Blend, Move
from engine.approximate.kinds import Compression
from engine.cache.ids import BlockId, TokenId
from engine.compute.compress import KvCompressor
from engine.compute.loading import LoadedModel
from engine.compute.place import Turns
from engine.compute.runner import TorchRunner
from engine.compute.scorers import Instructions
from engine.protocol import LEAST_KEEP, SCORERS, Document, Method
from engine.protocol.reports import Technique
from engine.schedule.runner import SampleParams, Work
from engine.sizing import aligned

MAX_KL = 0.5
"""In nats. A technique with a greater mean divergence from the exact distributions is refused."""
MIN_AGREEMENT = 0.7
"""The least share of tokens at which the most likely token must be the exact one."""
KEEPS = (0.75, 0.5, 0.25, LEAST_KEEP)
RECOMPUTES = (0, 4, 16, 32, 0.05, 0.15, 0.3)
NUM_TEXTS = 4
PREFIX_TOKENS = 256
REST_TOKENS = 64
_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class _Text:
    """A text that the model writes."""

    tokens: list[TokenId]
    # They hold the exact text.
    blocks: list[BlockId]
    # As many blocks, for the approximate text.
    spare: list[BlockId]


def measure(
    loaded: LoadedModel, instructions: Instructions, turns: Turns | None
) -> Iterator[Technique | None]:
    """Measure one technique after the other, in memory of its own.

    Yield each technique once it is measured, and None after each part of the work before.
    """
    prefix = min(PREFIX_TOKENS, loaded.max_context_tokens // 2) // _BLOCK_SIZE * _BLOCK_SIZE
    rest = min(REST_TOKENS, prefix)
    size = (prefix + rest) // _BLOCK_SIZE + 1
    runner = loaded.runner(2 * size * NUM_TEXTS, _BLOCK_SIZE)
    gate = _Gate(
        runner=runner,
        compressor=KvCompressor(runner, instructions, turns),
        texts=_new_texts(loaded, size),
        prefix=prefix,
    )
    yield from gate.write_texts(rest)
    yield from gate.measure_compression()
    if turns is not None:
        yield from gate.measure_placement()


def _new_texts(loaded: LoadedModel, size: int) -> list[_Text]:
    """Texts of one token, each with `size` blocks and as many spare ones."""
    first = loaded.model.config.bos_token_id
    token = TokenId(first if isinstance(first, int) else 0)
    texts: list[_Text] = []
    for number in range(NUM_TEXTS):
        begin = 2 * size * number
        blocks = [BlockId(block) for block in range(begin, begin + 2 * size)]
        texts.append(_Text([token], blocks[:size], blocks[size:]))
    return texts


@dataclass(kw_only=True)
class _Gate:
    """The measuring of one model. Its generators yield as `measure` does."""

    runner: TorchRunner
    compressor: KvCompressor
    texts: list[_Text]
    # The number of tokens of each text that are made approximate.
    prefix: int
    # For each text (rest, vocabulary): the log-probabilities behind the exact beginning.
    exact: list[torch.Tensor] = field(default_factory=list)

    def write_texts(self, rest: int) -> Iterator[None]:
        """Let the model write the prefixes and `rest` more tokens."""
        for place in range(self.prefix + rest - 1):
            drawn = self.runner.execute(
                [
                    Work(
                        token_ids=text.tokens[-1:],
                        start=place,
                        block_table=text.blocks,
                        sample=SampleParams(temperature=1, top_p=1, top_k=0, seed=seed),
                    )
                    for seed, text in enumerate(self.texts)
                ]
            )
            for text, token in zip(self.texts, drawn, strict=True):
                assert token is not None
                text.tokens.append(token)
            yield
        for text in self.texts:
            self.exact.append(self._behind(text, text.blocks, self.prefix))
            yield

    def measure_compression(self) -> Iterator[Technique | None]:
        for scorer in SCORERS:
            for keep in KEEPS:
                kept = aligned(int(self.prefix * keep), _BLOCK_SIZE)
                compression = Compression(scorer, keep, self.prefix, kept)
                log_probs: list[torch.Tensor] = []
                for text in self.texts:
                    move = Move([(0, kept)], text.blocks, text.spare)
                    for _ in self.compressor.compress(compression, text.tokens, move):
                        yield None
                    log_probs.append(self._behind(text, text.spare, kept))
                    yield None
                yield compare(scorer, keep, self.exact, log_probs)

    def measure_placement(self) -> Iterator[Technique | None]:
        """Measure documents that are placed. It must come last: it overwrites the exact texts."""
        border = self.prefix * 5 // 8
        spans = [(self.prefix // 4, border), (border, self.prefix)]
        tables_of_texts = []
        for text in self.texts:
            middle = len(text.blocks) // 2
            tables = [text.blocks[:middle], text.blocks[middle:]]
            compute_apart(self.runner, text.tokens, spans, tables)
            tables_of_texts.append(tables)
            yield None
        for recompute in RECOMPUTES:
            log_probs: list[torch.Tensor] = []
            for text, tables in zip(self.texts, tables_of_texts, strict=True):
                yield from place_in_parts(
                    self.runner,
                    self.compressor,
                    text.tokens,
                    spans,
                    tables,
                    text.spare,
                    recompute,
                )
                log_probs.append(self._behind(text, text.spare, self.prefix))
                yield None
            yield compare("blocks", recompute, self.exact, log_probs)

    def _behind(self, text: _Text, blocks: list[BlockId], start: int) -> torch.Tensor:
        """The log-probabilities (rest, vocabulary) behind each token of the rest.

        `blocks` hold the beginning in their first `start` slots.
        """
        rest = text.tokens[self.prefix :]
        work = Work(
            token_ids=rest,
            start=start,
            block_table=blocks,
            sample=SampleParams(temperature=0, top_p=1, top_k=0, seed=0),
            draft=rest[1:],
            cut=self.prefix - start,
        )
        return self.runner.logits([work]).float().log_softmax(-1)


def compute_apart(
    runner: TorchRunner,
    tokens: Sequence[TokenId],
    spans: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
) -> None:
    """Compute the documents at these spans of a prompt by themselves, each in its own table."""
    for (start, end), blocks in zip(spans, tables, strict=True):
        alone = [tokens[0], *tokens[start:end]]
        runner.execute([Work(token_ids=alone, start=0, block_table=blocks)])


def place_documents(
    runner: TorchRunner,
    compressor: KvCompressor,
    tokens: Sequence[TokenId],
    spans: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    targets: Sequence[int],
    recompute: int | float,
) -> None:
    """Run `place_in_parts` to its end."""
    for _ in place_in_parts(runner, compressor, tokens, spans, tables, targets, recompute):
        pass


def place_in_parts(
    runner: TorchRunner,
    compressor: KvCompressor,
    tokens: Sequence[TokenId],
    spans: Sequence[tuple[int, int]],
    tables: Sequence[Sequence[int]],
    targets: Sequence[int],
    recompute: int | float,
) -> Iterator[None]:
    """Compute a prompt up to the end of its last document, in parts.

    `tables` have the documents as `compute_apart` wrote them. Each document is copied to its place
    in the blocks of `targets`, except for the tokens that are computed again.
    """
    recipe = Document(0, recompute=recompute)
    documents: list[Blend] = []
    for (start, end), blocks in zip(spans, tables, strict=True):
        num = min(recipe.num_recomputed(end - start), end - start)
        documents.append(Blend(start, end, num, blocks, []))
    end = spans[-1][1]
    copied = set[int]()
    if isinstance(recompute, float):
        for _ in compressor.choose(tokens, [(0, end)], documents, targets):
            yield
    for document in documents:
        computed = document.chosen or range(document.start, document.start + document.num)
        move = Move([(document.start, document.end)], document.blocks, targets)
        for _ in compressor.place(document.start - 1, move):
            yield
        copied.update(set(range(document.start, document.end)).difference(computed))
    works: list[Work] = []
    position = 0
    while position < end:
        stop = next((place for place in range(position, end) if place in copied), end)
        span = tokens[position:stop]
        if span:
            works.append(Work(token_ids=span, start=position, block_table=targets))
        position = stop + 1
    runner.execute(works)


def compare(
    method: Method,
    parameter: int | float,
    exact: list[torch.Tensor],
    approximate: list[torch.Tensor],
) -> Technique:
    """Judge a technique by the log-probabilities (tokens, vocabulary) of each text.

    Its divergence is the mean of KL(exact || approximate) over all tokens, in nats.
    """
    p = torch.cat(exact)
    q = torch.cat(approximate)
    kl = float((p.exp() * (p - q)).sum(-1).mean())
    agreement = float((p.argmax(-1) == q.argmax(-1)).float().mean())
    return Technique(
        method=method,
        parameter=parameter,
        kl=kl,
        agreement=agreement,
        tokens=len(p),
        is_allowed=kl <= MAX_KL and agreement >= MIN_AGREEMENT,
    )
