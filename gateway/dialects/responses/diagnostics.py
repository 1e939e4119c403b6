"""Prompt cache diagnostics as responses carry them."""

from typing import Literal

import msgspec

MissReason = Literal["model_changed", "tools_changed", "input_changed"]
_REASONS: dict[str, MissReason] = {
    "model_changed": "model_changed",
    "tools_changed": "tools_changed",
    "system_changed": "input_changed",
    "messages_changed": "input_changed",
}


class CacheMiss(msgspec.Struct, frozen=True, tag="cache_miss"):
    cache_missed_tokens: int
    reason: MissReason


class CacheHit(msgspec.Struct, frozen=True, tag="cache_hit"):
    pass


class ComparisonNotFound(msgspec.Struct, frozen=True, tag="comparison_response_not_found"):
    pass


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable"):
    pass


Diagnostics = CacheMiss | CacheHit | ComparisonNotFound | Unavailable


def diagnostics_of(kind: str | None, missed_tokens: int | None, *, has_read: bool) -> Diagnostics:
    """`kind` is the divergence's, None where the prompt only grew.

    Such a prompt may still not be read: its entry can be gone.
    """
    if kind is None:
        return CacheHit() if has_read else Unavailable()
    if kind not in _REASONS or missed_tokens is None:
        return Unavailable()
    return CacheMiss(missed_tokens, _REASONS[kind])
