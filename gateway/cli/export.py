"""python -m gateway export: prints usage as CSV

The rows are read into a temporary file first. So the database is held for a bounded time, however
slowly the output is read, and an export that fails prints nothing.
"""

import argparse
import shutil
import sys
import time
from tempfile import SpooledTemporaryFile

from gateway.base.errors import LedgerUnavailable
from gateway.cli.arguments import Commands, moment_ms
from gateway.cli.in_ledger import now_ms, run_long_in_ledger
from gateway.ledger.database import Ledger
from gateway.ledger.export import EXPORT_SECONDS, turn_lines, usage_lines
from gateway.ledger.reads.sums import Range

_STEPS = {"hours": 3600, "days": 86_400}
_MEMORY_BYTES = 16 << 20


def add_commands(commands: Commands) -> None:
    export = commands.add_parser("export", help="print usage as CSV")
    export.add_argument("--since", type=moment_ms, required=True, metavar="TIME", help="RFC 3339")
    export.add_argument("--until", type=moment_ms, metavar="TIME", help="default: now")
    export.add_argument("--rows", choices=("hours", "days", "turns"), default="hours")
    export.add_argument("--workspace")
    export.add_argument(
        "--seconds",
        type=_seconds,
        default=EXPORT_SECONDS,
        help="for reading the database, at most (default: %(default)g)",
    )
    export.set_defaults(run=_export)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds <= 86_400:
        raise argparse.ArgumentTypeError("must be above 0 and at most 86400")
    return seconds


def _export(options: argparse.Namespace) -> int:
    until = now_ms() if options.until is None else options.until
    if options.since >= until:
        print("--since: must be before --until", file=sys.stderr)
        return 2
    of = Range(since_ms=options.since, until_ms=until, workspace=options.workspace)
    rows, seconds = options.rows, options.seconds
    with SpooledTemporaryFile(_MEMORY_BYTES, "w+", encoding="utf-8", newline="") as read:

        async def collect(ledger: Ledger) -> None:
            if rows == "turns":
                lines = turn_lines(ledger, of, seconds)
            else:
                lines = usage_lines(ledger, of, _STEPS[rows], seconds)
            async for line in lines:
                read.write(line)

        begun = time.monotonic()
        try:
            run_long_in_ledger(collect)
        except LedgerUnavailable as error:
            if type(error) is not LedgerUnavailable or time.monotonic() - begun < seconds:
                raise
            print(
                f"reading took more than {seconds:g} seconds and was ended: ask for a shorter"
                " range, or for more with --seconds",
                file=sys.stderr,
            )
            return 1
        read.seek(0)
        shutil.copyfileobj(read, sys.stdout)
    return 0
