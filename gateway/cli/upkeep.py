"""python -m gateway journal | rollups | retain | export | prices: the operator's upkeep

An export's rows are first written to a temporary file. So a slow reader of the output does not hold
up the database, and an export that fails prints nothing.
"""

import argparse
import asyncio
import shutil
import sqlite3
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from tempfile import SpooledTemporaryFile
from typing import Any, TypeVar

from gateway.admission.accounts import month_of
from gateway.base.clock import Clock
from gateway.base.errors import JournalUnavailable, LedgerNotMigrated, LedgerUnavailable, NotFound
from gateway.base.settings import load_database, load_price_files
from gateway.base.words import counted
from gateway.cli import arguments
from gateway.journal.file import has_journal, rows_in
from gateway.journal.table import ASIDE, CLOSED
from gateway.journal.versions import check_version
from gateway.ledger.database import DEADLINE_SECONDS, Ledger, with_ledger
from gateway.ledger.reads.sums import Range
from gateway.ledger.upkeep import (
    EXPORT_SECONDS,
    moment,
    rebuild,
    retain,
    turn_lines,
    turns_since_ms,
    usage_lines,
)
from gateway.prices.files import HOSTED, SHIPPED, WRITES, load_prices
from gateway.prices.price import PriceSheets, per_million

Result = TypeVar("Result")
_STEPS = {"hours": 3600, "days": 86_400}
_MEMORY_BYTES = 16 << 20


def add_commands(commands: arguments.Commands) -> None:
    journal = arguments.add_actions(commands, "journal", "the journal of this gateway")
    listed = journal.add_parser("list", help="turns that were set aside, with why")
    listed.add_argument("--journal", type=Path, help="its directory; default: of HOLDFAST_DATA")
    listed.set_defaults(run=_list)
    sums = arguments.add_actions(commands, "rollups", "sums of the ledger")
    sums.add_parser("rebuild", help="make all sums again from the turns").set_defaults(run=_rebuild)
    keep = commands.add_parser("retain", help="delete what is older, safe beside a running gateway")
    keep.add_argument(
        "--turns", type=arguments.age_ms, required=True, metavar="AGE", help="like 90d, 12w, 1y"
    )
    keep.add_argument(
        "--rollups", type=arguments.age_ms, required=True, metavar="AGE", help="like 2y"
    )
    keep.set_defaults(run=_retain)
    export = commands.add_parser("export", help="print usage as CSV")
    export.add_argument(
        "--since", type=arguments.moment_ms, required=True, metavar="TIME", help="RFC 3339"
    )
    export.add_argument("--until", type=arguments.moment_ms, metavar="TIME", help="default: now")
    export.add_argument("--rows", choices=("hours", "days", "turns"), default="hours")
    export.add_argument("--workspace")
    export.add_argument(
        "--seconds",
        type=arguments.number(float, 1e-6, 86_400, "above 0 and at most 86400"),
        default=EXPORT_SECONDS,
        help="for reading the database, at most (default: %(default)g)",
    )
    export.set_defaults(run=_export)
    prices = arguments.add_actions(commands, "prices", "check and list price sheets")
    check = prices.add_parser("check", help="read price files and say what is wrong")
    check.add_argument("files", nargs="*", type=Path, help="default: those the settings name")
    check.set_defaults(run=_check_prices)
    prices.add_parser("list", help="print today's prices").set_defaults(run=_list_prices)


def run_long_in_ledger(
    work: Callable[[Ledger], Coroutine[Any, Any, Result]], *deadline: float
) -> Result:
    """Run one piece of work with the longer deadlines of commands, if none are given. Raise
    LedgerNotMigrated where the settings name a file that does not exist."""
    settings = load_database()
    path = settings.sqlite_path
    # A URL may also have options behind the path, or be SQLite's own `file:`.
    if path is not None and not {"?", ":"} & set(str(path)) and not path.exists():
        raise LedgerNotMigrated(
            f"there is no database at `{path}`: run `python -m gateway migrate` with the settings"
            " of `serve`"
        )
    return asyncio.run(with_ledger(settings.ledger_url, work, *deadline))


def run_in_ledger(work: Callable[[Ledger], Coroutine[Any, Any, Result]]) -> Result:
    """Run one piece of work with the deadlines of requests."""
    return run_long_in_ledger(work, DEADLINE_SECONDS)


def now_ms() -> int:
    return int(Clock().wall().timestamp() * 1000)


def _list(options: argparse.Namespace) -> int:
    directory = options.journal or load_database().data / "journal"
    check_version(directory)
    if not has_journal(directory):
        raise NotFound(f"no journal in `{directory}`")
    try:
        rows = [row for row in rows_in(directory) if row.state == ASIDE]
    except (OSError, sqlite3.Error) as error:
        raise JournalUnavailable(f"journal `{directory}`: {error}") from None
    for row in sorted(rows):
        print(row.id, row.at, row.reason, f"{counted(len(row.record or b''), 'byte')} kept")
    return 0


def _rebuild(_: argparse.Namespace) -> int:
    print(f"made the sums of {counted(run_long_in_ledger(rebuild), 'day')} again")
    return 0


def _retain(options: argparse.Namespace) -> int:
    if options.rollups < options.turns:
        raise arguments.UsageError("--rollups: must be at least as long as --turns")
    if options.turns < 2 * arguments.UNITS_MS["d"]:
        # A killed gateway repeats its last inserts. The rows of the first insert must still be
        # there.
        raise arguments.UsageError("--turns: must be at least 2d")
    now = now_ms()
    month = int(month_of(Clock().wall()).timestamp() * 1000)
    deleted = run_long_in_ledger(
        lambda ledger: retain(ledger, now - options.turns, now - options.rollups, month)
    )
    print(f"deleted {counted(deleted.turns, 'turn')} and {counted(deleted.rollups, 'sum')}")
    if now - options.rollups > month:
        print("sums of the running month stay: spend limits are counted from them")
    return 0


def _export(options: argparse.Namespace) -> int:
    until = now_ms() if options.until is None else options.until
    if options.since >= until:
        raise arguments.UsageError("--since: must be before --until")
    of = Range(since_ms=options.since, until_ms=until, workspace=options.workspace)
    seconds = options.seconds
    lacks = _waiting(load_database().data / "journal")
    with SpooledTemporaryFile(_MEMORY_BYTES, "w+", encoding="utf-8", newline="") as file:

        async def collect(ledger: Ledger) -> None:
            step = _STEPS.get(options.rows)
            since_ms = None if step else await turns_since_ms(ledger, of)
            if since_ms is not None:
                lacks.append(
                    f"turns of before {moment(since_ms)} were deleted (`retain`): --rows days has"
                    " their sums"
                )
            async for line in (
                usage_lines(ledger, of, step, seconds) if step else turn_lines(ledger, of, seconds)
            ):
                file.write(line)

        began = time.monotonic()
        try:
            run_long_in_ledger(collect)
        except LedgerUnavailable as error:
            if type(error) is not LedgerUnavailable or time.monotonic() - began < seconds:
                raise
            print(
                f"reading took more than {seconds:g} seconds and was ended: ask for a shorter"
                " range, or for more with --seconds",
                file=sys.stderr,
            )
            return 1
        file.seek(0)
        shutil.copyfileobj(file, sys.stdout)
    for text in lacks:
        print(f"not in this export: {text}", file=sys.stderr)
    return 0


def _waiting(directory: Path) -> list[str]:
    """Lines about the turns that the ledger lacks and the journal of the settings has."""
    if not has_journal(directory):
        return []
    check_version(directory)
    try:
        states = [row.state for row in rows_in(directory)]
    except (OSError, sqlite3.Error) as error:
        return [f"what waits in the journal `{directory}` is not known: {error}"]
    closed = states.count(CLOSED)
    aside = states.count(ASIDE)
    lacks = []
    if closed:
        turns = counted(closed, "turn")
        lacks.append(f"{turns} of this gateway that ended, and wait in `{directory}`")
    if aside:
        turns = counted(aside, "turn")
        lacks.append(f"{turns} that the journal has set aside (`journal list`)")
    return lacks


def _check_prices(options: argparse.Namespace) -> int:
    files = load_price_files()
    for path in options.files or [files.prices or SHIPPED, files.hosted_prices or HOSTED]:
        print(f"{path}: {len(load_prices(path).all)} prices, no problem")
    return 0


def _list_prices(_: argparse.Namespace) -> int:
    files = load_price_files()
    print("own prices, dollars per million tokens")
    _print_sheet(load_prices(files.prices or SHIPPED))
    published = load_prices(files.hosted_prices or HOSTED)
    print(f"\npublished prices, for comparison only ({published.source}, {published.as_of})")
    _print_sheet(published)
    return 0


def _print_sheet(sheets: PriceSheets) -> None:
    names = ("input", *WRITES, "read", "output")
    print(f"{'id':48}", *(f"{name:>9}" for name in names))
    for price in sheets.current(Clock().wall().date()):
        bands = [("", price.rates)]
        bands += [(f" above {band.above_prompt_tokens:,}", band.rates) for band in price.bands]
        for label, rates in bands:
            writes = (rates.write(ttl) for ttl in WRITES.values())
            columns = map(per_million, (rates.input, *writes, rates.read, rates.output))
            print(f"{price.id + label:48}", *(f"{column:>9}" for column in columns))
