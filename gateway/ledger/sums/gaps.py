"""The gaps between turns of one prefix, exact for any order of arrival.

A turn that arrives late comes between two others. From then on the later one's gap is shorter. So
its neighbours are looked up among all turns. Nearly all turns arrive in order: their gaps follow
from the moment of their prefix's last turn alone.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from sqlalchemy import Connection, bindparam, func, select, tuple_, update
from sqlalchemy.orm import aliased

from gateway.ledger.schema import PrefixRow, TurnRow
from gateway.ledger.sums.inserted import are_inserted

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


Changes = Counter[tuple[str, str, str]]
"""By workspace, prefix and column, how much a sum grows."""


def gaps_in_order(connection: Connection, values: Mapping[str, Any]) -> tuple[Changes, list[str]]:
    """The gaps of turns that SQLite has just inserted in order, and the ids of the others.

    A prefix whose first new turn is not older than its last one before gets no turn between two
    others. This runs before the new turns are added to the prefixes. SQLite has a single writer, so
    nobody else adds any meanwhile. `values` are those of `inserted`.
    """
    changes: Changes = Counter()
    late: list[str] = []
    found: Any = connection.execute(_with_last(), values)
    for own, turns in groupby(found, key=lambda row: (row.workspace_id, row.prefix)):
        inserted = list(turns)
        moments = [turn.opened_ms for turn in inserted]
        last = inserted[0].last_ms
        if last is not None and moments[0] < last:
            late += [turn.id for turn in inserted]
            continue
        for before, after in pairwise(moments if last is None else [last, *moments]):
            _count(changes, own, after - before, 1)
    return changes, late


@cache
def _with_last() -> Any:
    """The query: each prefix's inserted turns in their order, with the moment of its last turn."""
    is_own = (PrefixRow.workspace_id == TurnRow.workspace_id) & (PrefixRow.prefix == TurnRow.prefix)
    return (
        select(
            TurnRow.id, TurnRow.workspace_id, TurnRow.prefix, TurnRow.opened_ms, PrefixRow.last_ms
        )
        .outerjoin(PrefixRow, is_own)
        .where(TurnRow.prefix.is_not(None), are_inserted(on_postgres=False))
        .order_by(TurnRow.workspace_id, TurnRow.prefix, TurnRow.opened_ms)
    )


def gaps_among_others(connection: Connection, turn_ids: Sequence[str]) -> Changes:
    """The gaps of turns that this transaction has inserted. It has locked their prefixes."""
    changes: Changes = Counter()
    added = _added(connection, turn_ids)
    opened = {turn.id: turn.opened_ms for turn in added.values()}
    neighbours = {n for turn in added.values() for n in (turn.before, turn.after) if n is not None}
    if others := neighbours - opened.keys():
        query = select(TurnRow.id, TurnRow.opened_ms).where(TurnRow.id.in_(others))
        opened |= {row.id: row.opened_ms for row in connection.execute(query)}
    for turn in added.values():
        own = (turn.workspace, turn.prefix)
        _count_pair(changes, own, opened, (turn.before, turn.id), 1)
        if turn.after is None or turn.after in added:
            continue
        # `after` was there already. Its gap was counted to the nearest earlier turn that was there.
        earlier = turn.before
        while earlier is not None and earlier in added:
            earlier = added[earlier].before
        _count_pair(changes, own, opened, (turn.id, turn.after), 1)
        _count_pair(changes, own, opened, (earlier, turn.after), -1)
    return changes


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


def _count_pair(
    changes: Changes,
    own: tuple[str, str],
    opened: dict[str, int],
    pair: tuple[str | None, str],
    sign: int,
) -> None:
    first, second = pair
    if first is not None:
        _count(changes, own, opened[second] - opened[first], sign)


def _count(changes: Changes, own: tuple[str, str], gap: int, sign: int) -> None:
    if gap <= FIVE_MINUTES_MS:
        changes[(*own, "gaps_5m")] += sign
    elif gap <= HOUR_MS:
        changes[(*own, "gaps_1h")] += sign


def add_gaps(connection: Connection, changes: Changes) -> None:
    """Add the gaps to their prefixes, whose rows are there."""
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
