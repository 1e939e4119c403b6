"""The approximations that a request may ask for, and what an answer says of them."""

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
"""A share of a document's tokens is rounded to one of these parts."""
Recompute = (
    Annotated[int, Meta(ge=0, le=MAX_RECOMPUTE)]
    | Annotated[float, Meta(ge=1 / SHARE_PARTS, le=1 - 1 / SHARE_PARTS)]
)
"""Which tokens of a document are computed: a number of its first ones, or a share of all."""


class Document(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A segment whose text is computed by itself, and is read wherever it stands.

    Its exact entry is the prompt's first token and the text. In a prompt some of the document's
    tokens are computed. The keys and values of the others are copied, and the keys are turned to
    their new positions. The copy is an approximation, and so is all that follows it. An entry that
    ended is not written again while the prompt's own blocks have the copy.
    """

    segment: NotNegative
    # How long the exact entry is held.
    ttl: Ttl = "5m"
    # An int: how many first tokens are computed. Below 1: the share, of the most differing tokens.
    recompute: Recompute = DEFAULT_RECOMPUTE
    # The gateway's digest of the text alone. It is held while the entry's blocks are.
    name: str = ""

    def num_recomputed(self, num_tokens: int) -> int:
        """How many tokens are computed in a prompt, if the document has `num_tokens`."""
        if isinstance(self.recompute, int):
            return self.recompute
        return math.ceil(num_tokens * round(self.recompute * SHARE_PARTS) / SHARE_PARTS)


class Compressed(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="compressed"):
    """An answer's prompt was computed behind a compressed prefix."""

    scorer: Scorer
    # The part of the prefix that the request wanted kept, 0 to 1.
    keep: float
    # The tokens that were kept in each layer.
    kept: int
    # The tokens of the exact prefix.
    of: int

    @property
    def text(self) -> str:
        return f"compressed {self.scorer} {self.keep:g}: {self.kept} of {self.of}"

    @property
    def method(self) -> Method:
        return self.scorer


class FromDocuments(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="blocks"):
    """An answer's prompt has documents that are read wherever they stand."""

    method: ClassVar[Method] = "blocks"
    documents: int
    # The documents' tokens that were copied, or read with an entry of this prompt.
    reused: int
    # The documents' tokens that were computed in this prompt.
    recomputed: int

    @property
    def text(self) -> str:
        return f"blocks {self.documents}: {self.reused} reused, {self.recomputed} recomputed"


class FromSibling(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag="sibling"):
    """The first tokens of an answer's prompt may have been read from a sibling model's entry."""

    method: ClassVar[Method] = "sibling"
    # The tokens that were read, now or when an entry of this prompt was written; 0: all is exact.
    reused: int
    # How many of the first layers were computed for these tokens.
    recomputed_layers: int
    # How many layers the model has.
    of_layers: int

    @property
    def text(self) -> str:
        if not self.reused:
            return "sibling: 0 reused"
        layers = f"{self.recomputed_layers} of {self.of_layers} layers"
        return f"sibling: {self.reused} reused, {layers} recomputed"


Approximation = Compressed | FromDocuments | FromSibling
