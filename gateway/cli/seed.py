"""python -m gateway seed: an empty database gets a made-up month, to look at the dashboard with."""

import argparse
import asyncio
import random
import time
from datetime import UTC, datetime, timedelta
from typing import Any

from gateway.base.clock import Clock
from gateway.base.settings import DatabaseSettings, load_database, load_price_files
from gateway.cli.arguments import Commands, moment_ms
from gateway.ledger import upkeep
from gateway.ledger.database import Ledger, with_ledger
from gateway.prices.book import PriceBook
from gateway.sample.arrivals import DAYS
from gateway.sample.cast import APPS
from gateway.sample.month import Month, key_id_of

DEFAULT_TURNS = 60_000
_MAX_TURNS = 2_000_000


def add_commands(commands: Commands) -> None:
    seed = commands.add_parser(
        "seed", help="fill an empty database with a month of made-up turns, marked as such"
    )
    seed.add_argument("--turns", type=_count, default=DEFAULT_TURNS, help="about how many")
    seed.add_argument("--seed", type=int, default=1, help="the same number gives the same month")
    seed.add_argument(
        "--until", type=moment_ms, metavar="TIME", help="where the month ends; default: now"
    )
    seed.set_defaults(run=_seed)


def _count(written: str) -> int:
    number = int(written) if written.isascii() and written.isdigit() else 0
    if not 1 <= number <= _MAX_TURNS:
        raise argparse.ArgumentTypeError(f"`{written}` is not a number from 1 to {_MAX_TURNS:,}")
    return number


def _seed(options: argparse.Namespace) -> int:
    until = Clock().wall()
    if options.until is not None:
        until = datetime.fromtimestamp(options.until / 1000, UTC)
    started = time.monotonic()
    turns = fill_sample(load_database(), until, options.turns, options.seed)
    print(f"{turns:,} made-up turns of {DAYS} days in {time.monotonic() - started:.0f} s")
    print("This database holds sample data from now on: a gateway shows it and serves no turns.")
    return 0


def fill_sample(settings: DatabaseSettings, until: datetime, num_turns: int, seed: int) -> int:
    """Mark the database and fill it; return how many turns there are. `until` is aware UTC.

    Raise InvalidRequest where it is not empty.
    """
    files = load_price_files()
    month = Month(until, num_turns, seed, PriceBook(files.prices, files.hosted_prices))
    workspaces, keys = _workspaces(until), _keys(until, seed)

    async def work(ledger: Ledger) -> int:
        await upkeep.claim(ledger, until, workspaces, keys)
        return await upkeep.fill(ledger, month.records())

    return asyncio.run(with_ledger(settings.ledger_url, work))


def _workspaces(until: datetime) -> list[dict[str, Any]]:
    """Limits as somebody might have set them; `prototype` was told to stay small."""
    spend, rate = {"prototype": 100 * 10**9}, {"prototype": 120}
    return [
        {
            "id": app.workspace,
            "display_name": app.workspace.replace("-", " ").capitalize(),
            "created_at": until - timedelta(days=DAYS + 60 - number),
            "monthly_spend_nano": spend.get(app.workspace),
            "requests_per_minute": rate.get(app.workspace),
        }
        for number, app in enumerate(APPS)
    ]


def _keys(until: datetime, seed: int) -> list[dict[str, Any]]:
    """Keys that open nothing: their digests are drawn, nobody has what they are digests of."""
    chance = random.Random(f"keys of {seed}")  # noqa: S311 - repeatable on purpose
    return [
        {
            "id": key_id_of(app.workspace, name),
            "workspace_id": app.workspace,
            "name": name,
            "digest": f"{chance.getrandbits(256):064x}",
            "scope": "inference",
            "created_at": until - timedelta(days=DAYS + 1),
            "last_used_at": until - timedelta(minutes=chance.randrange(1, 600)),
        }
        for app in APPS
        for name in app.keys
    ]
