"""The states of limited workspaces in PostgreSQL, where all gateways see them."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from sqlalchemy import bindparam, func, select, update
from sqlalchemy.dialects.postgresql import insert

from gateway.ledger.database import Ledger
from gateway.ledger.schema import SharedLimitsRow

_SECONDS = 1.0
# A gateway that is frozen in an exchange holds its locks no longer than two seconds.
_FROZEN = select(func.set_config("idle_in_transaction_session_timeout", "2000", True))
_ROW = SharedLimitsRow.__table__
_CHANGE = (
    update(SharedLimitsRow)
    .where(SharedLimitsRow.workspace_id == bindparam("name"))
    .values(state=bindparam("text"))
)


@dataclass(frozen=True, slots=True)
class Exchange:
    """The states of workspaces by id, locked. What is there at the end is written.

    `now` is the clock that all gateways read, in seconds.
    """

    now: float
    states: dict[str, str]


class SharedLimitsTable:
    def __init__(self, ledger: Ledger) -> None:
        """`ledger` is on PostgreSQL: SQLite serves one gateway."""
        self._ledger = ledger

    @asynccontextmanager
    async def exchange(self, workspaces: Sequence[str]) -> AsyncIterator[Exchange]:
        """Lock the rows in the order of their ids, so that gateways never wait in a circle.

        Raise LedgerUnavailable and its like, at the latest after a second.
        """
        async with self._ledger.transaction(_SECONDS) as connection:
            await connection.execute(_FROZEN)
            if workspaces:
                new = [{"workspace_id": name, "state": ""} for name in workspaces]
                await connection.execute(insert(SharedLimitsRow).on_conflict_do_nothing(), new)
            locked = (
                select(_ROW.c.workspace_id, _ROW.c.state)
                .where(_ROW.c.workspace_id.in_(workspaces))
                .order_by(_ROW.c.workspace_id)
                .with_for_update()
            )
            found = (await connection.execute(locked)).all()
            now = await connection.scalar(select(func.extract("epoch", func.clock_timestamp())))
            page = Exchange(float(now or 0), {name: state for name, state in found})
            yield page
            if page.states:
                changed = [{"name": name, "text": text} for name, text in page.states.items()]
                await connection.execute(_CHANGE, changed)
