"""The ledger as a worker sees it: the parent process inserts the turns of all workers."""

from collections.abc import Sequence

from gateway.base.errors import (
    GatewayError,
    LedgerDamaged,
    LedgerRefused,
    LedgerReplaced,
    LedgerUnavailable,
    SampleData,
)
from gateway.base.link import Failed, Link
from gateway.base.record import TurnRecord

_SECONDS = 60.0
"""Workers insert one after the other, and each insertion has a deadline of its own."""
_KINDS: dict[str, type[GatewayError]] = {
    kind.__name__: kind
    for kind in (LedgerDamaged, LedgerRefused, LedgerReplaced, LedgerUnavailable, SampleData)
}


class RemoteLedger:
    def __init__(self, link: Link) -> None:
        self._link = link

    async def insert(self, records: Sequence[TurnRecord]) -> None:
        """As `Ledger.insert_turns`, with the same errors; Overloaded without an answer.

        An insertion whose answer was lost is repeated, which changes nothing.
        """
        try:
            await self._link.ask("insert", list(records), type(None), _SECONDS)
        except Failed as failed:
            raise _KINDS.get(failed.kind, LedgerUnavailable)(str(failed)) from failed
