"""Which lease or copy makes way where another has no room.

What makes way loses as little as it can:

1. A lease on the device whose entry has a whole copy in the store is *lowered*: the store keeps the
   copy, and the entry stays leased (`next_to_lower`).
2. A lease without a copy ends: it yields to another's claim (`next_to_yield`), or is sacrificed
   where nothing else can run (`next_to_sacrifice`). Its entry is best-effort.
3. In the store a copy goes (`scope_to_displace`). Its entry stays if its content is above.

A scope may lease the whole budget until another scope needs its share. An entry that gets no lease
is best-effort.

`device_leases.Leases` and `store_copies.StoreCopies` apply this to our own blocks.
`engine.backends.vllm.leases` applies the second rule to vLLM's. Its first rule is a weaker one: of
each scope only the lease that would end first is looked at for a copy. So a lease may end there
although another one has a copy. The third is for `engine.backends.vllm.tiers`, with its own orders.
"""

from collections.abc import Iterable, Mapping
from typing import Generic, NamedTuple, Protocol, TypeVar

from engine.cache.block import Entry
from engine.cache.order import Key


class Lease(Protocol):
    """The part of an entry that `ending_key` reads."""

    @property
    def expires_at(self) -> float: ...


L = TypeVar("L", bound=Lease)


class ScopeLeases(NamedTuple, Generic[L]):
    """One scope's leases."""

    # The blocks that they lease.
    num_blocks: int
    # The scope's share of the budget, in blocks.
    share: int
    # The lease that makes way before the scope's others. For `next_to_lower` it is the one with the
    # least `lowering_key` among those that have a copy. For `next_to_yield` it is the one with the
    # least `ending_key` among all.
    first: L | None
    # The scope. Read by `next_to_lower` alone.
    name: str = ""


class Claim(NamedTuple):
    """A new lease that the budget has no room for."""

    # The blocks that its scope would lease with it.
    num_blocks: int
    # The scope's share of the budget, in blocks.
    share: int
    # The blocks beyond the budget that all scopes would lease with it.
    excess: int


# Within a scope: what has the least key makes way first.


def lowering_key(entry: Entry) -> Key:
    """The least recently used lease is lowered first."""
    return entry.used_at, 0.0


def ending_key(lease: Lease) -> Key:
    """The lease that would expire first yields first, and is sacrificed first."""
    return lease.expires_at, 0.0


def displacing_key(entry: Entry) -> Key:
    """The copies of best-effort entries go first, and of those the soonest expiry."""
    return entry.is_leased, entry.expires_at


def own_displacing_key(entry: Entry) -> Key | None:
    """The copies of a scope's automatic entries make way for its own new copies, the least recently
    used first. None: the entry is not automatic."""
    return None if entry.is_asked_for else (entry.used_at, 0.0)


# Between scopes.


def next_to_lower(scopes: Iterable[ScopeLeases[Entry]], needy: str | None = None) -> Entry | None:
    """The lease that is lowered next. None if no lease may be lowered.

    The `first` lease of each scope has a copy. Without a `needy` scope nothing else can run, and
    the least recently used lease of all is lowered. For a needy scope only its own leases make way,
    and the leases of scopes above their share.
    """
    able = (
        scope for scope in scopes if needy in (None, scope.name) or scope.num_blocks > scope.share
    )
    firsts = (scope.first for scope in able if scope.first is not None)
    return min(firsts, key=lowering_key, default=None)


def next_to_yield(scopes: Iterable[ScopeLeases[L]], claim: Claim) -> L | None:
    """The lease that yields next to a claim. None if no lease may yield.

    Leases of the scopes above their share yield, the one that would expire first before others.
    They yield only if the claim stays within its scope's share, and if those scopes have enough
    blocks above their shares. So no lease ends in vain, and no scope gets below its share by more
    than its last lease.
    """
    able = [scope for scope in scopes if scope.num_blocks > scope.share]
    above = sum(scope.num_blocks - scope.share for scope in able)
    if claim.num_blocks > claim.share or above < claim.excess:
        return None
    firsts = (scope.first for scope in able if scope.first is not None)
    return min(firsts, key=ending_key, default=None)


def next_to_sacrifice(firsts: Iterable[L | None]) -> L | None:
    """The lease that is sacrificed next, whatever its scope's share. None if there is none.

    `firsts` has for each scope the lease with the least `ending_key`, or None without such a lease.
    """
    leases = (lease for lease in firsts if lease is not None)
    return min(leases, key=ending_key, default=None)


def scope_to_displace(num_blocks: Mapping[str, int], needy: str, num_new: int) -> str | None:
    """The scope whose copies make way in the store for `num_new` blocks of a needy scope.

    `num_blocks` has the blocks of each scope's copies. The scope with the most blocks makes way.
    None if that is the needy scope itself, or if it has fewer blocks than the needy scope would
    have with its new ones.
    """
    largest = max(num_blocks, key=lambda scope: num_blocks[scope], default=needy)
    if largest == needy or num_blocks[largest] < num_blocks.get(needy, 0) + num_new:
        return None
    return largest
