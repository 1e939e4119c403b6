"""What a key may do, how much a workspace may use, and how much of that is left. Plain values."""

from dataclasses import dataclass
from typing import NamedTuple

from gateway.structs.fleet import AutoCacheMode, AutoCacheTtl, Workspace


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The limits of a workspace; None is no limit. Token limits count input without cache reads,
    and output. `monthly_spend` is in nano-dollars, for a calendar month in UTC."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    max_concurrency: int | None = None
    monthly_spend: int | None = None


NO_LIMITS = Limits()


class RateStatus(NamedTuple):
    """One limit, and how much of it is left."""

    limit: int
    remaining: int
    # After how many seconds without use all of the limit is there again.
    reset_seconds: float


class RateStatuses(NamedTuple):
    """A workspace's limits per minute; None for one that it does not have."""

    requests: RateStatus | None
    tokens: RateStatus | None


def limits_of(workspace: Workspace) -> Limits:
    return Limits(
        requests_per_minute=workspace.requests_per_minute,
        tokens_per_minute=workspace.tokens_per_minute,
        max_concurrency=workspace.max_concurrency,
        monthly_spend=workspace.monthly_spend_nano,
    )


@dataclass(frozen=True, slots=True)
class AutoCache:
    """The breakpoints that are added to requests that mark nothing, in dialects without markers."""

    # `prefix`: behind tools and system prompt. `conversation`: also behind the last turn.
    mode: AutoCacheMode = "conversation"
    ttl: AutoCacheTtl = "5m"
    # Whether they ask for leases: an operator set the policy for the workspace or the key. The
    # installation's own policy asks for none, so its entries are best-effort (`automatic`).
    hold: bool = False

    def but(self, mode: AutoCacheMode | None, ttl: AutoCacheTtl | None) -> "AutoCache":
        """This policy with the mode and the TTL that a workspace or a key sets. None sets
        nothing."""
        is_set = mode is not None or ttl is not None
        return AutoCache(mode or self.mode, ttl or self.ttl, self.hold or is_set)


DEFAULT_AUTO_CACHE = AutoCache()
