"""`kill -9` of the gateway, 50 times under 50 streams: nothing lost, nothing twice, nothing leaked.

Clients of both dialects keep asking a real engine. After every kill the gateway is started again
over its journal and closes what it left open. In the end the ledger is compared with what every
client was told and, class by class, with the engine's own totals. Ends with 1 if anything differs.
"""

import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.setup.options import parse
from tests.e2e.kills import run_kills, table
from tests.postgres import new_database, running_postgres


def main() -> int:
    options = parse(
        __doc__,
        kills=50,
        streams=50,
        database=(["sqlite", "postgres"], None, ["sqlite", "postgres"]),
        backend=("synthetic", None, ["synthetic", "native"]),
        seed=1,
        disk_ms=(0, "that each write of the gateway's journal waits at most before it begins"),
    )
    is_exact = True
    for kind in options.database:
        server = running_postgres() if kind == "postgres" else nullcontext("")
        with TemporaryDirectory(prefix="kills-") as directory, server as url:
            report = run_kills(
                Path(directory),
                kills=options.kills,
                streams=options.streams,
                backend=options.backend,
                database_url=new_database(url, "kills") if url else "",
                seed=options.seed,
                disk_seconds=options.disk_ms / 1000,
            )
        print(f"\n{kind}, {options.backend} engine, {options.streams} streams\n\n{table(report)}\n")
        print("exact" if report.is_exact else f"NOT EXACT {report.lost} {report.wrong}", flush=True)
        is_exact &= report.is_exact
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
