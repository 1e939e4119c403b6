"""What a request may ask for that is not exact, and what an answer says of it."""

import math
from typing import Annotated, ClassVar, Literal, get_args

import msgspec
from msgspec import Meta

from engine.protocol.bounds import NotNegative
from engine.protocol.ttls import Ttl

Scorer = Literal["kvzip", "keydiff", "chunkkv", "snapkv", "h2o", "sinks", "random"]
SCORERS: tuple[Scorer, ...] = get_args(Scorer)
DEFAULT_SCORER: Scorer = "kvzip"
Method = Scorer | Literal["blocks", "sibling"]
LEAST_KEEP = 0.1
KEEP_FIELD = "breakpoints: keep"
"""Refusals of a `Breakpoint.keep` begin with this."""
SIBLING_FIELD = "breakpoints: sibling"
DEFAULT_RECOMPUTE = 16
MAX_RECOMPUTE = 1_000_000
SHARE_PARTS = 10_000
"""A share of a document's tokens is told in such parts."""
Recompute = (
    Annotated[int, Meta(ge=0, le=MAX_RECOMPUTE)]
    | Annotated[float, Meta(ge=1 / SHARE_PARTS, le=1 - 1 / SHARE_PARTS)]
)
"""So many of a document's first tokens, or a share of all."""


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A segment whose text is computed by itself, and is read wherever it stands.

    Its exact entry is the prompt's first token and the text. In a prompt some of its tokens are
    computed. The keys and values of the others are copied, and the keys are turned to their new
    positions: an approximation, and so is all that follows. An entry that ended is not written
    again while the prompt's own blocks have the copy.
    """

    segment: NotNegative
    # How long the exact entry is held.
    ttl: Ttl = "5m"
    # How many of its first tokens are computed where it stands. Below 1: which share of its tokens,
    # those whose values differ most.
    recompute: Recompute = DEFAULT_RECOMPUTE
    # The gateway's digest of the text alone. It is held while the entry's blocks are.
    name: str = ""

    def num_recomputed(self, num_tokens: int) -> int:
        """How many of its tokens are computed where it stands."""
        if isinstance(self.recompute, int):
            return self.recompute
        return math.ceil(num_tokens * round(self.recompute * SHARE_PARTS) / SHARE_PARTS)


class Compressed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="compressed"):
    """An answer's prompt was computed behind a compressed prefix."""

    scorer: Scorer
    # The part of the prefix that was asked for.
    keep: float
    # So many tokens were kept in each layer,
    kept: int
    # of so many.
    of: int

    @property
    def text(self) -> str:
        return f"compressed {self.scorer} {self.keep:g}: {self.kept} of {self.of}"

    @property
    def method(self) -> Method:
        return self.scorer


class FromDocuments(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="blocks"):
    """Documents stand in an answer's prompt."""

    method: ClassVar[Method] = "blocks"
    documents: int
    # The documents' tokens that were copied, or read with an entry of this prompt.
    reused: int
    # Those that were computed where they stand.
    recomputed: int

    @property
    def text(self) -> str:
        return f"blocks {self.documents}: {self.reused} reused, {self.recomputed} recomputed"


class FromSibling(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sibling"):
    """The first tokens of an answer's prompt may have been read from a sibling model's entry."""

    method: ClassVar[Method] = "sibling"
    # So many tokens were, now or when an entry of this prompt was written. With 0 the prompt is
    # exact.
    reused: int
    # How many of the first layers were computed all the same,
    recomputed_layers: int
    # of so many.
    of_layers: int

    @property
    def text(self) -> str:
        if not self.reused:
            return "sibling: 0 reused"
        layers = f"{self.recomputed_layers} of {self.of_layers} layers"
        return f"sibling: {self.reused} reused, {layers} recomputed"


Approximation = Compressed | FromDocuments | FromSibling
