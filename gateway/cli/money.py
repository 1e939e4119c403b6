"""python -m gateway prices check|list, retain, rollups rebuild, export: money and the ledger."""

import argparse
import asyncio
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gateway.base.clock import Clock
from gateway.base.settings import load_database, load_price_files
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.export import turn_lines, usage_lines
from gateway.ledger.reads.ranges import Range
from gateway.ledger.upkeep import rebuild, retain
from gateway.limits.admission import month_of
from gateway.prices.files import HOSTED, SHIPPED, load_prices
from gateway.prices.money import per_million
from gateway.prices.sheets import PriceSheets

_UNITS_MS = {"d": 86_400_000, "w": 7 * 86_400_000, "y": 365 * 86_400_000}
_MIN_TURNS_MS = 2 * _UNITS_MS["d"]


def add_commands(commands: Any) -> None:
    """Add this module's commands to the program's parser; each sets `run`."""
    prices = commands.add_parser("prices", help="check and list price sheets").add_subparsers(
        required=True, metavar="action"
    )
    check = prices.add_parser("check", help="read price files and say what is wrong")
    check.add_argument("files", nargs="*", type=Path, help="default: those the settings name")
    check.set_defaults(run=_check_prices)
    prices.add_parser("list", help="print today's prices").set_defaults(run=_list_prices)
    keep = commands.add_parser("retain", help="delete what is older, safe beside a running gateway")
    keep.add_argument(
        "--turns", type=age_ms, required=True, metavar="AGE", help="like 90d, 12w, 1y"
    )
    keep.add_argument("--rollups", type=age_ms, required=True, metavar="AGE", help="like 2y")
    keep.set_defaults(run=_retain)
    sums = commands.add_parser("rollups", help="sums of the ledger").add_subparsers(
        required=True, metavar="action"
    )
    sums.add_parser("rebuild", help="make all sums again from the turns").set_defaults(run=_rebuild)
    export = commands.add_parser("export", help="print usage as CSV")
    export.add_argument("--since", type=moment_ms, required=True, metavar="TIME", help="RFC 3339")
    export.add_argument("--until", type=moment_ms, metavar="TIME", help="default: now")
    export.add_argument("--rows", choices=("hours", "days", "turns"), default="hours")
    export.add_argument("--workspace")
    export.set_defaults(run=_export)


def age_ms(written: str) -> int:
    """`90d`, `12w`, `2y`; raise ArgumentTypeError for anything else."""
    found = re.fullmatch(r"([1-9][0-9]{0,4})([dwy])", written)
    if found is None:
        raise argparse.ArgumentTypeError(f"`{written}` is not a number of days, weeks or years")
    return int(found[1]) * _UNITS_MS[found[2]]


def moment_ms(written: str) -> int:
    try:
        found = datetime.fromisoformat(written)
    except ValueError:
        raise argparse.ArgumentTypeError(f"`{written}` is not an RFC 3339 time") from None
    return int((found if found.tzinfo else found.replace(tzinfo=UTC)).timestamp() * 1000)


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
    names = ("input", "write_5m", "write_1h", "read", "output")
    print(f"{'id':48}", *(f"{name:>9}" for name in names))
    for price in sheets.current(Clock().wall().date()):
        bands = [("", price.rates)]
        bands += [(f" above {band.above_prompt_tokens:,}", band.rates) for band in price.bands]
        for label, rates in bands:
            shown = (per_million(getattr(rates, name)) for name in names)
            print(f"{price.id + label:48}", *(f"{each:>9}" for each in shown))


def _retain(options: argparse.Namespace) -> int:
    if options.rollups < options.turns:
        print("--rollups: must be at least as long as --turns", file=sys.stderr)
        return 2
    if options.turns < _MIN_TURNS_MS:
        # A gateway that was killed repeats what it had just inserted: that must still be there.
        print("--turns: must be at least 2d", file=sys.stderr)
        return 2
    now, month = _now_ms(), int(month_of(Clock().wall()).timestamp() * 1000)
    deleted = _with_ledger(
        lambda ledger: retain(ledger, now - options.turns, now - options.rollups, month)
    )
    print(f"deleted {deleted.turns} turns and {deleted.rollups} sums")
    if now - options.rollups > month:
        print("sums of the running month stay: spend limits are counted from them")
    return 0


def _rebuild(_: argparse.Namespace) -> int:
    print(f"made the sums of {_with_ledger(rebuild)} days again")
    return 0


def _export(options: argparse.Namespace) -> int:
    until = _now_ms() if options.until is None else options.until
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

    _with_ledger(write)
    return 0


def _with_ledger(work: Callable[[Ledger], Any]) -> Any:
    return asyncio.run(with_ledger(load_database().ledger_url, work))


def _now_ms() -> int:
    return int(Clock().wall().timestamp() * 1000)
