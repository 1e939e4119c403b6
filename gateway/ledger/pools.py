"""The pools of connections to the one database: parts that must not wait for each other."""

from contextlib import AsyncExitStack
from dataclasses import dataclass

from gateway.ledger.database import DEADLINE_SECONDS, Ledger
from gateway.ledger.identity import Identity

_DRAIN_CONNECTIONS = 2
_ACCESS_CONNECTIONS = 6
_STORE_CONNECTIONS = 8
_READ_CONNECTIONS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Ledgers:
    """Pools of one database, so that large reads delay neither the drain nor a revocation.

    `access` is for keys and workspaces, `store` for what clients keep: batches, cached contents.
    """

    drain: Ledger
    access: Ledger
    store: Ledger
    reads: Ledger

    def hurry(self) -> None:
        """The process is about to end: no pool waits long for a locked file any more."""
        for ledger in (self.drain, self.access, self.store, self.reads):
            ledger.hurry()


def open_ledgers(stack: AsyncExitStack, url: str) -> Ledgers:
    """Open all pools; the stack closes them."""
    identity = Identity()

    def opened(pool_size: int, seconds: float = DEADLINE_SECONDS) -> Ledger:
        ledger = Ledger(url, seconds, pool_size, identity)
        stack.push_async_callback(ledger.close)
        return ledger

    return Ledgers(
        drain=opened(_DRAIN_CONNECTIONS),
        access=opened(_ACCESS_CONNECTIONS),
        store=opened(_STORE_CONNECTIONS),
        reads=opened(_READ_CONNECTIONS),
    )
