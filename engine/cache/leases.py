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
    # The lease that makes way before the scope's others: the one with the least `lowering_key` of
    # those with a copy for `next_to_lower`, with the least `ending_key` of all for `next_to_yield`.
    first: L | None
    # The scope. Read by `next_to_lower` alone.
    name: str = ""


class Claim(NamedTuple):
    """A new lease that the budget has no room for."""

    # What its scope leases with it, in blocks.
    num_blocks: int
    # The scope's share of the budget, in blocks.
    share: int
    # What all scopes lease with it beyond the budget, in blocks.
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
    """A scope's new copies take the place of its own automatic entries', by least recent use. None:
    the entry is not automatic."""
    return None if entry.is_asked_for else (entry.used_at, 0.0)


# Between scopes.


def next_to_lower(scopes: Iterable[ScopeLeases[Entry]], needy: str | None = None) -> Entry | None:
    """The lease that is lowered next: `first` of each scope has a copy. None if none may.

    Without a `needy` scope nothing else can run, and the least recently used one of all is lowered.
    For a needy scope its own and those of scopes above their share make way.
    """
    able = (
        scope for scope in scopes if needy in (None, scope.name) or scope.num_blocks > scope.share
    )
    firsts = (scope.first for scope in able if scope.first is not None)
    return min(firsts, key=lowering_key, default=None)


def next_to_yield(scopes: Iterable[ScopeLeases[L]], claim: Claim) -> L | None:
    """The lease that yields next to a claim. None if none may.

    The scopes above their share yield, what would expire first before others. They do so if the
    claim stays within its scope's share, and they have enough above theirs. So no lease ends in
    vain, and no scope gets below its share by more than its last lease.
    """
    able = [scope for scope in scopes if scope.num_blocks > scope.share]
    above = sum(scope.num_blocks - scope.share for scope in able)
    if claim.num_blocks > claim.share or above < claim.excess:
        return None
    firsts = (scope.first for scope in able if scope.first is not None)
    return min(firsts, key=ending_key, default=None)


def next_to_sacrifice(firsts: Iterable[L | None]) -> L | None:
    """The lease that is sacrificed next, whatever its scope's share. None if there is none.

    `firsts`: of each scope the lease with the least `ending_key`, None where it has none to give.
    """
    leases = (lease for lease in firsts if lease is not None)
    return min(leases, key=ending_key, default=None)


def scope_to_displace(num_blocks: Mapping[str, int], needy: str, num_new: int) -> str | None:
    """The scope whose copies make way in the store for `num_new` blocks of a needy scope.

    `num_blocks`: what each scope's copies have. The scope with the most makes way. None if that is
    the needy one itself, or would have less than the needy one with its new blocks.
    """
    largest = max(num_blocks, key=lambda scope: num_blocks[scope], default=needy)
    if largest == needy or num_blocks[largest] < num_blocks.get(needy, 0) + num_new:
        return None
    return largest
