"""python -m gateway export: prints usage as CSV"""

import argparse
import sys

from gateway.cli.arguments import Commands, moment_ms
from gateway.cli.in_ledger import now_ms, run_long_in_ledger
from gateway.ledger.database import Ledger
from gateway.ledger.export import turn_lines, usage_lines
from gateway.ledger.reads.ranges import Range


def add_commands(commands: Commands) -> None:
    export = commands.add_parser("export", help="print usage as CSV")
    export.add_argument("--since", type=moment_ms, required=True, metavar="TIME", help="RFC 3339")
    export.add_argument("--until", type=moment_ms, metavar="TIME", help="default: now")
    export.add_argument("--rows", choices=("hours", "days", "turns"), default="hours")
    export.add_argument("--workspace")
    export.set_defaults(run=_export)


def _export(options: argparse.Namespace) -> int:
    until = now_ms() if options.until is None else options.until
    if options.since >= until:
        print("--since: must be before --until", file=sys.stderr)
        return 2
    of = Range(since_ms=options.since, until_ms=until, workspace=options.workspace)

    async def write(ledger: Ledger) -> None:
        seconds = {"hours": 3600, "days": 86_400}
        rows = options.rows
        lines = (
            turn_lines(ledger, of) if rows == "turns" else usage_lines(ledger, of, seconds[rows])
        )
        async for line in lines:
            sys.stdout.write(line)

    run_long_in_ledger(write)
    return 0
