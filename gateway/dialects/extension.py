"""Our own object in every dialect's response: what the engine really did."""

from collections.abc import Sequence
from typing import Literal, Protocol

import msgspec
from msgspec import UNSET, UnsetType

from engine.protocol import Started, Tier, Ttl
from gateway.base.grants import AutoCache
from gateway.prompt.ignored import Ignored


class Found(Protocol):
    """What the gateway adds to an answer. It is complete when the engine's first frame is there.

    `ignored` are the fields of the request that were not done. `auto_cache` is the policy that
    marked a request without markers.
    """

    @property
    def engine(self) -> str: ...
    @property
    def miss_reason(self) -> str | None: ...
    @property
    def ignored(self) -> Sequence[Ignored]: ...
    @property
    def auto_cache(self) -> AutoCache | None: ...


class HoldfastBreakpoint(msgspec.Struct, frozen=True, kw_only=True):
    """The result of one marker. `expires_in_seconds` is there only if it is leased.

    `is_exact` is false, and else not there, where the entry ends before the marked text does: a
    token that begins in the text could be another with other text behind it.
    """

    path: str
    state: Literal["leased", "best_effort", "none"]
    tokens: int | None = None
    ttl: Ttl | None = None
    expires_in_seconds: float | None = None
    reason: str | None = None
    is_exact: bool | UnsetType = UNSET


class Holdfast(msgspec.Struct, frozen=True, kw_only=True):
    """Clients that don't know it ignore it.

    `computed_tokens` of the prompt went through the model, `automatic_tokens` were reused from
    memory without being billed as a read. `written_tokens` are billed as writes; it is sent where
    the dialect's own usage can't say so. `miss_reason` None: read in full, or the prefix grew.
    `ignored` is there if a field of the request was not done, `auto_cache` if breakpoints are the
    server's own. `folded` are the paths of system messages that the model's chat template can't
    take where they stand: the engine told them in the user's turn beside it. `read_tier` is the
    lowest tier that the read came from, there with a read; `bring_back_seconds` are those until all
    of it was on the device, there where it was not.
    """

    engine: str
    automatic_tokens: int
    computed_tokens: int
    written_tokens: int | UnsetType = UNSET
    breakpoints: list[HoldfastBreakpoint]
    miss_reason: str | None = None
    ignored: Sequence[Ignored] | UnsetType = UNSET
    auto_cache: AutoCache | UnsetType = UNSET
    folded: Sequence[str] | UnsetType = UNSET
    read_tier: Tier | UnsetType = UNSET
    bring_back_seconds: float | UnsetType = UNSET


def extension_of(started: Started, found: Found, paths: Sequence[str]) -> Holdfast:
    """`paths` name the request's segments, in prompt order."""
    return Holdfast(
        engine=found.engine,
        automatic_tokens=started.usage.automatic_tokens,
        computed_tokens=started.usage.computed_tokens,
        breakpoints=[
            HoldfastBreakpoint(
                path=paths[report.segment],
                state=report.state,
                tokens=report.tokens,
                ttl=report.ttl,
                expires_in_seconds=report.expires_in_seconds,
                reason=report.reason,
                is_exact=False if report.segment in started.inexact else UNSET,
            )
            for report in started.breakpoints
        ],
        miss_reason=found.miss_reason,
        ignored=found.ignored or UNSET,
        auto_cache=found.auto_cache or UNSET,
        folded=[paths[segment] for segment in started.folded] or UNSET,
        read_tier=started.read_tier or UNSET,
        bring_back_seconds=started.bring_back_seconds or UNSET,
    )
