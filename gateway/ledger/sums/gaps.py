"""The gaps between turns of one prefix, exact for any order of arrival.

A turn that arrives late comes between two others. From then on the later one's gap is shorter.
"""

from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, func, select, tuple_, update
from sqlalchemy.orm import aliased

from gateway.ledger.schema import PrefixRow, TurnRow

FIVE_MINUTES_MS = 300_000
HOUR_MS = 3_600_000


class _Added(NamedTuple):
    """An inserted turn and the turns right before and after it, with the same prefix."""

    id: str
    workspace: str
    prefix: str
    opened_ms: int
    before: str | None
    after: str | None


def add_gaps(connection: Connection, turn_ids: Sequence[str]) -> None:
    """Count the gaps of turns that this transaction has inserted. It has locked their prefixes."""
    added = _added(connection, turn_ids)
    if not added:
        return
    opened = {turn.id: turn.opened_ms for turn in added.values()}
    neighbours = {n for turn in added.values() for n in (turn.before, turn.after) if n is not None}
    if others := neighbours - opened.keys():
        query = select(TurnRow.id, TurnRow.opened_ms).where(TurnRow.id.in_(others))
        opened |= {row.id: row.opened_ms for row in connection.execute(query)}
    changes: Counter[tuple[str, str, str]] = Counter()
    for turn in added.values():
        own = (turn.workspace, turn.prefix)
        _count(changes, own, opened, (turn.before, turn.id), 1)
        if turn.after is None or turn.after in added:
            continue
        # `after` was there already. Its gap was counted to the nearest earlier turn that was there.
        earlier = turn.before
        while earlier is not None and earlier in added:
            earlier = added[earlier].before
        _count(changes, own, opened, (turn.id, turn.after), 1)
        _count(changes, own, opened, (earlier, turn.after), -1)
    _apply(connection, changes)


@cache
def neighbours() -> Any:
    """The query. It is made once, since making it costs more than running it."""
    other = aliased(TurnRow)
    place = tuple_(TurnRow.opened_ms, TurnRow.id)
    # By the prefix's index alone. Without statistics SQLite might take the workspace's, and look at
    # each of its turns.
    near = select(other.id).where(
        func.coalesce(other.workspace_id, "") == TurnRow.workspace_id,
        other.prefix == TurnRow.prefix,
    )
    there = tuple_(other.opened_ms, other.id)
    before = near.where(there < place).order_by(other.opened_ms.desc(), other.id.desc()).limit(1)
    after = near.where(there > place).order_by(other.opened_ms, other.id).limit(1)
    return select(
        TurnRow.id,
        TurnRow.workspace_id,
        TurnRow.prefix,
        TurnRow.opened_ms,
        before.scalar_subquery().label("before"),
        after.scalar_subquery().label("after"),
    ).where(TurnRow.id.in_(bindparam("turn_ids", expanding=True)), TurnRow.prefix.is_not(None))


def _added(connection: Connection, turn_ids: Sequence[str]) -> dict[str, _Added]:
    rows: Any = connection.execute(neighbours(), {"turn_ids": turn_ids})
    return {row.id: _Added(*row) for row in rows}


def _count(
    changes: Counter[tuple[str, str, str]],
    own: tuple[str, str],
    opened: dict[str, int],
    pair: tuple[str | None, str],
    sign: int,
) -> None:
    first, second = pair
    if first is None:
        return
    gap = opened[second] - opened[first]
    if gap <= FIVE_MINUTES_MS:
        changes[(*own, "gaps_5m")] += sign
    elif gap <= HOUR_MS:
        changes[(*own, "gaps_1h")] += sign


def _apply(connection: Connection, changes: Counter[tuple[str, str, str]]) -> None:
    owners = sorted({(workspace, prefix) for workspace, prefix, _ in changes})
    if not owners:
        return
    statement = (
        update(PrefixRow)
        .where(
            PrefixRow.workspace_id == bindparam("of_workspace"),
            PrefixRow.prefix == bindparam("of_prefix"),
        )
        .values(
            gaps_5m=PrefixRow.gaps_5m + bindparam("more_5m"),
            gaps_1h=PrefixRow.gaps_1h + bindparam("more_1h"),
        )
    )
    rows = [
        {
            "of_workspace": workspace,
            "of_prefix": prefix,
            "more_5m": changes[(workspace, prefix, "gaps_5m")],
            "more_1h": changes[(workspace, prefix, "gaps_1h")],
        }
        for workspace, prefix in owners
    ]
    connection.execute(statement, rows)
