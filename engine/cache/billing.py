"""How a prompt's tokens are billed: as read, written for an hour or for five minutes, or input.

The rules are those of the public prompt-caching contract ("Mixed TTL"). Pure.
"""

from collections.abc import Sequence

from engine.cache.lookup import Mark
from engine.protocol import InputUsage


def bill(marks: Sequence[Mark], prompt_tokens: int, read: int, reused: int) -> InputUsage:
    """Split the prompt by class: read up to A, 1h writes up to B, 5m writes up to C, then input.

    `read` is A, the longest hit. `reused` is all that came from memory, with or without an entry
    (at least A).
    """
    last = max((mark.tokens for mark in marks), default=0)
    last = max(last, read)
    hour = max((m.tokens for m in marks if m.ttl == "1h" and m.tokens > read), default=read)
    return InputUsage(
        input_tokens=prompt_tokens - last,
        cache_read_tokens=read,
        cache_write_1h_tokens=hour - read,
        cache_write_5m_tokens=last - hour,
        automatic_tokens=reused - read,
        computed_tokens=prompt_tokens - reused,
    )
