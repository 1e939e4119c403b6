"""A compressed prompt as the cache sees it: of its first tokens each layer keeps some.

Slot j of a layer holds the layer's j-th kept token, so one block table serves all layers. Keys stay
rotated as they were. A later token keeps its position in the whole prompt, and its slot lies `cut`
before. The cache counts slots: the prompt is one whose first `kept` tokens stand for what is kept.
They are bytes of a digest of all the tokens and of the kind, so that equal ones mean equal content,
and the kind is in the chain of digests. So such blocks are found, compared, shared, leased, evicted
and stored like any others, and no exact prompt begins with them.
"""

from dataclasses import replace
from hashlib import shake_256

from msgspec import structs

from engine.cache.compression import Compression
from engine.cache.ids import TokenId
from engine.cache.lookup import Segment
from engine.cache.prefix_cache import CacheQuery, PrefixCache
from engine.protocol import HeldName


def compressed(query: CacheQuery, cache: PrefixCache, how: Compression) -> CacheQuery:
    """The prompt in slots. `origin` is the exact beginning, with the prompt's marks and names."""

    def slot(end: int | None) -> int | None:
        return None if end is None or end < how.of else end - how.cut

    exact = query.tokens[: how.of]
    digests = cache.digests(query.scope, exact)
    origin = replace(query, tokens=exact, digests=digests)
    standing = shake_256(bytes.fromhex(how.domain.digest) + digests.packed).digest(how.kept)
    # Every vocabulary has these.
    tokens = [*(TokenId(byte & 127) for byte in standing), *query.tokens[how.of :]]
    return replace(
        query,
        tokens=tokens,
        digests=cache.digests(query.scope, tokens, how.domain),
        segments=[Segment(one.kind, slot(one.end), one.turn) for one in query.segments],
        breakpoints=[structs.replace(one, keep=None) for one in query.breakpoints],
        names=[HeldName(one.digest, slot(one.tokens) or 0) for one in query.names],
        min_tokens=1,  # it was asked of the prefix that is compressed
        origin=origin,
        compression=how,
    )
