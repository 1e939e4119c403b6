"""A range of turns as a trace, for planners and load generators."""

from typing import Annotated

from litestar import get
from litestar.di import NamedDependency
from litestar.params import QueryParameter
from litestar.response import Stream

from gateway.admin.advice import in_thread
from gateway.admin.controller import ASKED_RANGE, AdminController, Deps
from gateway.base.errors import InvalidRequest
from gateway.http.auth import EXPORT, AdminRequest
from gateway.ledger.reads.sums import Range
from gateway.ledger.reads.turns import observed
from gateway.planning.trace import MAX_POINTS, TraceGathering
from gateway.planning.traffic import MAX_TURNS, TRACE_UNIT

LEAST_BLOCK = 16
LARGEST_BLOCK = 4096
TOO_MUCH = (
    f"since_ms, until_ms: a trace has at most {MAX_TURNS:,} requests, with {MAX_POINTS:,} known"
    " places of their prompts: ask for a shorter range"
)
_LINES = "application/x-ndjson"
# The place of all traces in the line for threads: one thread gathers at a time.
_LINE = "trace"


class TraceController(AdminController):
    dependencies = ASKED_RANGE

    @get(
        "/admin/v1/trace",
        operation_id="exportTrace",
        summary="A range's requests as a trace in Mooncake's format, without any content.",
        media_type=_LINES,
        opt=EXPORT,
    )
    async def trace(
        self,
        request: AdminRequest,
        services: Deps,
        of: NamedDependency[Range],
        block_tokens: Annotated[
            int, QueryParameter(name="block_tokens", ge=LEAST_BLOCK, le=LARGEST_BLOCK)
        ] = TRACE_UNIT,
        key: Annotated[str | None, QueryParameter(name="key", min_length=1, max_length=64)] = None,
    ) -> Stream:
        """Four headers describe the trace.

        - `holdfast-trace-block-tokens`: the tokens of a block
        - `holdfast-trace-requests`: the requests in the trace
        - `holdfast-trace-estimated`: those for which no engine told where content blocks end in
          tokens
        - `holdfast-trace-left-out`, without `key`: the range's requests that are not in the trace,
          because they had no answer or the ledger has no chain of their prompts
        """
        gathering = TraceGathering()
        async for rows in observed(services.queries.ledger, of, key, MAX_TURNS + 1):
            await in_thread(services, request.user, _LINE, gathering.take, rows)
            if gathering.is_too_much:
                raise InvalidRequest(TOO_MUCH)
        gathering.check_blocks(block_tokens)
        headers = {
            "content-disposition": f'attachment; filename="holdfast-trace-{block_tokens}.jsonl"',
            "holdfast-trace-block-tokens": str(block_tokens),
            "holdfast-trace-requests": str(gathering.num_turns),
            "holdfast-trace-estimated": str(gathering.num_estimated),
        }
        if key is None:
            num_requests = (await services.queries.totals(of)).requests
            left_out = max(num_requests - gathering.num_turns, 0)
            headers["holdfast-trace-left-out"] = str(left_out)
        return Stream(gathering.pieces(block_tokens), media_type=_LINES, headers=headers)
