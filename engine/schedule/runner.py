"""The interface between the scheduler and the model: the work of one step."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from engine.cache.digests import ChainKind
from engine.cache.ids import BlockId, TokenId
from engine.cache.recurrent import StateMove
from engine.cache.store_tier import Payload


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleParams:
    """How to draw the next token; `temperature` 0 is greedy, `top_k` 0 and `top_p` 1 are off.

    `seed` is fixed per sequence. Besides the logits a draw depends on the seed and the position
    alone, so a preempted sequence continues with the same draws.

    `bias` is added to the logits of its tokens. The penalties are taken from those of the tokens
    that the sequence has sampled: one where there are any, the other for each of them. For the
    `repetition_penalty` (see the protocol) its prompt counts too. Before `min_tokens` are sampled
    no token ends it. `min_p` is a share of the most likely token's probability.
    """

    temperature: float
    top_p: float
    top_k: int
    seed: int
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_p: float = 0.0
    min_tokens: int = 0
    bias: Mapping[TokenId, float] = field(default_factory=dict)


@dataclass(slots=True)
class DrawnProbs:
    """Where the runner tells the log-probabilities of a sequence's latest draw.

    `drawn` is the drawn token's, `top` are the `num_top` most likely tokens with theirs. They are
    the model's own: at temperature 1, before biases, penalties and `allowed`.
    """

    num_top: int
    drawn: float = 0.0
    top: list[tuple[TokenId, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sequence's share of a step.

    The keys and values of slots [0, start) are in `block_table` already; those of `token_ids`,
    at slots start, start + 1, …, are to be computed and written through it. The table covers
    all of them. `sample` None means that the last token's logits are not needed. `allowed` are the
    tokens to draw from, a bit per token id, lowest first; beyond it none is allowed; None: all.
    `bias` is added to the logits of its tokens. Where there are `probs`, the runner fills them.
    `seen` has a byte for each token id, 1 where the repetition penalty counts it.

    The last of `token_ids` may be only proposed, as `draft` has them. The runner draws behind the
    token before them. As long as it drew what was proposed it draws behind that too, into `behind`.
    A work with a draft has no `allowed`, `bias`, `seen` or `probs`.

    `state` says where the recurrent state behind [0, start) is, and where the new one is written,
    for models with linear layers. `adapter` acts on the tokens from its start on.

    `start` counts slots. The tokens' positions are `cut` more.
    """

    token_ids: Sequence[TokenId]
    start: int
    block_table: Sequence[int]
    sample: SampleParams | None = None
    allowed: bytes | None = None
    bias: Mapping[TokenId, float] | None = None
    seen: bytearray | None = None
    probs: DrawnProbs | None = None
    draft: Sequence[TokenId] = ()
    behind: list[TokenId] = field(default_factory=list)
    state: StateMove | None = None
    adapter: ChainKind | None = None
    cut: int = 0

    @property
    def next_position(self) -> int:
        """That of the first token that is drawn."""
        return self.start + len(self.token_ids) - len(self.draft)


class Runner(Protocol):
    """Owns the KV memory of blocks 0 … num_blocks - 1, and the host's.

    It is called from one thread.
    """

    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        """Compute one step; the next token of each work that samples, None for the others.

        Behind proposed tokens it draws as `Work` says.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks (source, destination) in all layers, before the next `execute`."""
        ...

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Write zeros to whole blocks, before any later call reads or writes them."""
        ...

    def demote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy blocks (device, host) to host memory, before any later call changes the device's."""
        ...

    def promote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy blocks (host, device) back, before any later call reads or overwrites either."""
        ...

    def save(self, blocks: Sequence[BlockId]) -> Sequence[Payload]:
        """A copy of device blocks' content, all layers, as the store keeps it."""
        ...

    def load(self, loads: Sequence[tuple[Payload, BlockId]]) -> None:
        """Write what `save` gave into device blocks, before any later call reads them."""
        ...
