"""python -m gateway trace: the requests of a range in Mooncake's format, without any content"""

import argparse
import sys

from gateway.admin.trace import LARGEST_BLOCK, LEAST_BLOCK, TOO_MUCH
from gateway.base.errors import InvalidRequest
from gateway.base.words import counted
from gateway.cli import arguments
from gateway.cli.upkeep import now_ms, run_long_in_ledger
from gateway.ledger.database import Ledger
from gateway.ledger.reads.sums import Queries, Range
from gateway.ledger.reads.turns import observed
from gateway.planning.trace import TraceGathering
from gateway.planning.traffic import MAX_TURNS, TRACE_UNIT


def add_commands(commands: arguments.Commands) -> None:
    trace = commands.add_parser("trace", help="print requests as a trace in Mooncake's format")
    trace.add_argument("--since", type=arguments.moment_ms, metavar="TIME", help="default: a week")
    trace.add_argument("--until", type=arguments.moment_ms, metavar="TIME", help="default: now")
    trace.add_argument("--workspace")
    trace.add_argument("--model")
    trace.add_argument(
        "--block-tokens",
        type=arguments.number(
            int, LEAST_BLOCK, LARGEST_BLOCK, f"a whole number from {LEAST_BLOCK} to {LARGEST_BLOCK}"
        ),
        default=TRACE_UNIT,
        help="tokens of a block (default: %(default)d)",
    )
    trace.set_defaults(run=_trace)


def _trace(options: argparse.Namespace) -> int:
    until = now_ms() if options.until is None else options.until
    since = until - arguments.UNITS_MS["w"] if options.since is None else options.since
    if since >= until:
        raise arguments.UsageError("--since: must be before --until")
    of = Range(since_ms=since, until_ms=until, workspace=options.workspace, model=options.model)
    gathering = TraceGathering()

    async def gather(ledger: Ledger) -> int:
        async for rows in observed(ledger, of, None, MAX_TURNS + 1):
            gathering.take(rows)
        return (await Queries(ledger).totals(of)).requests

    num_requests = run_long_in_ledger(gather)
    if gathering.is_too_much:
        raise arguments.UsageError(TOO_MUCH.replace("since_ms, until_ms", "--since, --until"))
    try:
        gathering.check_blocks(options.block_tokens)
    except InvalidRequest as error:
        raise arguments.UsageError(f"--{error}".replace("block_tokens", "block-tokens")) from None
    for piece in gathering.pieces(options.block_tokens):
        sys.stdout.buffer.write(piece)
    sys.stdout.buffer.flush()
    left_out = max(num_requests - gathering.num_turns, 0)
    print(
        f"{counted(gathering.num_turns, 'request')} in blocks of {options.block_tokens} tokens;"
        f" {left_out} left out, because they had no answer or the ledger has no chain of their"
        " prompts;"
        f" for {gathering.num_estimated} no engine told where content blocks end in tokens",
        file=sys.stderr,
    )
    return 0
