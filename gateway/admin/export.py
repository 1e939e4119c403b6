"""Usage as CSV, for other programs."""

from typing import Annotated, Literal

from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter
from litestar.response import Stream

from gateway.admin.controller import ASKED_RANGE, AdminController, Deps
from gateway.http.auth import EXPORT
from gateway.ledger.reads.sums import Range
from gateway.ledger.upkeep import (
    check_rows,
    moment,
    turn_lines,
    turns_since_ms,
    usage_lines,
)

_CSV = "text/csv; charset=utf-8"
WAITING_HEADER = "holdfast-turns-waiting"
"""The header with the number of turns that ended at this gateway and are not in the ledger yet. The
rows lack them."""
SINCE_HEADER = "holdfast-turns-since"
"""The header with the moment of the first remaining turn, if older turns were deleted."""
RowKind = Literal["hours", "days", "turns"]
# The seconds of an interval; None for single turns.
_SECONDS: dict[RowKind, int | None] = {"turns": None, "hours": 3600, "days": 86_400}


class ExportController(AdminController):
    dependencies = ASKED_RANGE

    @get(
        "/admin/v1/export.csv",
        operation_id="exportUsage",
        summary="Usage as CSV.",
        media_type=_CSV,
        opt=EXPORT,
    )
    async def export(
        self,
        services: Deps,
        of: NamedDependency[Range],
        rows: Annotated[RowKind, QueryParameter(name="rows")] = "hours",
    ) -> Stream:
        """Turns of this gateway that have ended and are not in the ledger yet have no row. The
        header `holdfast-turns-waiting` counts them. If older turns of the range were deleted,
        `turns` begins at the moment in the header `holdfast-turns-since`. Sums include them."""
        ledger = services.queries.ledger
        # The first query runs before the answer begins: without a database, or beyond the bound,
        # the answer is an error and not half a file.
        step = _SECONDS[rows]
        await check_rows(ledger, of, step, services.bounds.max_export_rows)
        lines = usage_lines(ledger, of, step) if step else turn_lines(ledger, of)
        headers = {
            "content-disposition": f'attachment; filename="holdfast-{rows}.csv"',
            # The turns are counted before the rows are read. So a turn may be in both, and each
            # turn is in at least one.
            WAITING_HEADER: str(services.journal.num_closed),
        }
        since_ms = None if step else await turns_since_ms(ledger, of)
        if since_ms is not None:
            headers[SINCE_HEADER] = moment(since_ms)
        return Stream(lines, media_type=_CSV, headers=headers)
