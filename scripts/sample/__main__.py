"""An empty database gets a made-up month, to look at the dashboard with. It is marked as that.

python -m scripts.sample [--turns 60000] [--seed 1]
"""

import asyncio
import random
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timedelta

from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.base.settings import DatabaseSettings, SettingsError, load_database, load_price_files
from gateway.ledger import upkeep
from gateway.ledger.database import Ledger, with_ledger
from gateway.prices.files import PriceBook
from scripts.sample.arrivals import DAYS
from scripts.sample.cast import APPS
from scripts.sample.month import Month, key_id_of
from scripts.setup.options import parse


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(
        __doc__,
        arguments,
        turns=(60_000, "about how many"),
        seed=(1, "the same number gives the same month"),
    )
    started = time.monotonic()
    try:
        turns = fill_sample(load_database(), Clock().wall(), options.turns, options.seed)
    except (SettingsError, GatewayError) as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{turns:,} made-up turns of {DAYS} days in {time.monotonic() - started:.0f} s")
    print("This database holds sample data from now on: a gateway shows it and serves no turns.")
    return 0


def fill_sample(settings: DatabaseSettings, until: datetime, num_turns: int, seed: int) -> int:
    """Mark the database and fill it; return how many turns there are. `until` is aware UTC.

    Raise InvalidRequest if it is not empty.
    """
    files = load_price_files()
    chance = random.Random(f"keys of {seed}")
    month = Month(until, num_turns, seed, PriceBook(files.prices, files.hosted_prices))
    # Limits that an operator might have set: `prototype` has small ones.
    workspaces = [
        {
            "id": app.workspace,
            "display_name": app.workspace.replace("-", " ").capitalize(),
            "created_at": until - timedelta(days=DAYS + 60 - number),
            "monthly_spend_nano": 100 * 10**9 if app.workspace == "prototype" else None,
            "requests_per_minute": 120 if app.workspace == "prototype" else None,
        }
        for number, app in enumerate(APPS)
    ]
    # Keys that open nothing: their digests are random, and no key has them.
    keys = [
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

    async def work(ledger: Ledger) -> int:
        await upkeep.claim(ledger, until, workspaces, keys)
        return await upkeep.fill(ledger, month.records(), month.epoch_reports)

    return asyncio.run(with_ledger(settings.ledger_url, work))


if __name__ == "__main__":
    sys.exit(main())
