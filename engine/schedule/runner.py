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
    """How to draw the next token.

    Besides the logits a draw depends on the seed and the position alone, so a preempted sequence
    continues with the same draws.
    """

    # 0 is greedy.
    temperature: float
    # 1 is off.
    top_p: float
    # 0 is off.
    top_k: int
    # The same for all draws of a sequence.
    seed: int
    # Subtracted from the logits of tokens that the sequence has sampled.
    presence_penalty: float = 0.0
    # Subtracted once for each time that the sequence has sampled the token.
    frequency_penalty: float = 0.0
    # Lowers the logits of tokens of the sequence and its prompt. Positive logits are divided by it,
    # others are multiplied by it.
    repetition_penalty: float = 1.0
    # A token is drawn only if its probability is at least this share of the likeliest token's.
    min_p: float = 0.0
    # The number of tokens that are sampled before a token may end the sequence.
    min_tokens: int = 0
    # Added to the logits of its tokens.
    bias: Mapping[TokenId, float] = field(default_factory=dict)


@dataclass(slots=True)
class DrawnProbs:
    """Where the runner writes the log-probabilities of a sequence's latest draw.

    They are the model's own: at temperature 1, before biases, penalties and `Work.allowed`.
    """

    # How many of the most likely tokens are wanted.
    num_top: int
    # The drawn token's log-probability.
    drawn: float = 0.0
    # The most likely tokens, with their log-probabilities.
    top: list[tuple[TokenId, float]] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sequence's share of a step.

    A work with a draft has no `allowed`, `bias`, `seen` or `probs`.
    """

    # The tokens whose keys and values are computed, at slots start, start + 1, … The last ones may
    # be the draft.
    token_ids: Sequence[TokenId]
    # The keys and values of slots [0, start) are in the blocks already.
    start: int
    # The blocks of all slots, in order.
    block_table: Sequence[int]
    # None: the last token's logits are not needed.
    sample: SampleParams | None = None
    # The tokens to draw from: a bit per token id, lowest first. Tokens beyond its end are not
    # allowed. None: all tokens are allowed.
    allowed: bytes | None = None
    # Added to the logits of its tokens.
    bias: Mapping[TokenId, float] | None = None
    # A byte for each token id: 1 where the repetition penalty counts it.
    seen: bytearray | None = None
    # To be filled by the runner.
    probs: DrawnProbs | None = None
    # The proposed tokens, which are the last of `token_ids`. The first token is drawn behind the
    # token in front of them.
    draft: Sequence[TokenId] = ()
    # The tokens that the runner draws behind proposed ones. It goes on as long as the token that it
    # draws is the proposed one.
    behind: list[TokenId] = field(default_factory=list)
    # For models with linear layers: where the recurrent state behind slot start is, and where the
    # new one is written.
    state: StateMove | None = None
    # The kind of a chain that an adapter acts on.
    adapter: ChainKind | None = None
    # A token's position is its slot plus this.
    cut: int = 0

    @property
    def next_position(self) -> int:
        """The position of the first token that is drawn."""
        return self.start + len(self.token_ids) - len(self.draft)


class Runner(Protocol):
    """Owns the KV memory of blocks 0 … num_blocks - 1, and the host's.

    It is called from one thread.
    """

    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        """Compute one step. Return the next token of each work that samples, None for the others.

        Further tokens are drawn behind proposed ones, as `Work.behind` says.
        """
        ...

    def copy_blocks(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy whole blocks (source, destination) in all layers, before the next `execute`."""
        ...

    def clear_blocks(self, blocks: Sequence[BlockId]) -> None:
        """Write zeros to whole blocks, before any later call reads or writes them."""
        ...

    def clear_from(self, places: Sequence[tuple[BlockId, int]]) -> None:
        """Write zeros to blocks from a slot on."""
        ...

    def clear_host(self, places: Sequence[tuple[BlockId, int]]) -> None:
        """Write zeros to blocks of the host's memory from a slot on."""
        ...

    def demote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy blocks (device, host) to host memory, before any later call changes the device's."""
        ...

    def promote(self, pairs: Sequence[tuple[BlockId, BlockId]]) -> None:
        """Copy blocks (host, device) back, before any later call reads or overwrites either."""
        ...

    def save(self, blocks: Sequence[BlockId]) -> Sequence[Payload]:
        """A copy of device blocks' content in all layers, in the form that the store keeps."""
        ...

    def load(self, loads: Sequence[tuple[Payload, BlockId]]) -> None:
        """Write what `save` gave into device blocks, before any later call reads them."""
        ...
