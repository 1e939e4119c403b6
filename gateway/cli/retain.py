"""python -m gateway retain: deletes old turns and sums"""

import argparse
import sys

from gateway.base.clock import Clock
from gateway.cli.arguments import UNITS_MS, Commands, age_ms
from gateway.cli.in_ledger import now_ms, run_long_in_ledger
from gateway.ledger.upkeep import retain
from gateway.limits.accounts import month_of

_MIN_TURNS_MS = 2 * UNITS_MS["d"]


def add_commands(commands: Commands) -> None:
    keep = commands.add_parser("retain", help="delete what is older, safe beside a running gateway")
    keep.add_argument(
        "--turns", type=age_ms, required=True, metavar="AGE", help="like 90d, 12w, 1y"
    )
    keep.add_argument("--rollups", type=age_ms, required=True, metavar="AGE", help="like 2y")
    keep.set_defaults(run=_retain)


def _retain(options: argparse.Namespace) -> int:
    if options.rollups < options.turns:
        print("--rollups: must be at least as long as --turns", file=sys.stderr)
        return 2
    if options.turns < _MIN_TURNS_MS:
        # A killed gateway repeats its last inserts. The rows of the first time must still be there.
        print("--turns: must be at least 2d", file=sys.stderr)
        return 2
    now, month = now_ms(), int(month_of(Clock().wall()).timestamp() * 1000)
    deleted = run_long_in_ledger(
        lambda ledger: retain(ledger, now - options.turns, now - options.rollups, month)
    )
    print(f"deleted {deleted.turns} turns and {deleted.rollups} sums")
    if now - options.rollups > month:
        print("sums of the running month stay: spend limits are counted from them")
    return 0
