"""`kill -9` of the gateway, 50 times under 50 streams: nothing lost, nothing twice, nothing leaked.

Clients of both dialects keep asking a real engine. After every kill the gateway is started again
over its journal and closes what it left open. In the end the ledger is compared with what every
client was told and, class by class, with the engine's own totals. Ends with 1 if anything differs.
"""

import argparse
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.stack import ROOT
from tests.e2e.kills import run_kills, table
from tests.postgres import new_database, running_postgres


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--database", choices=["sqlite", "postgres", "both"], default="both")
    parser.add_argument("--backend", choices=["synthetic", "native"], default="synthetic")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    kinds = ["sqlite", "postgres"] if options.database == "both" else [options.database]
    os.chdir(ROOT)
    is_exact = True
    for kind in kinds:
        server = running_postgres() if kind == "postgres" else nullcontext("")
        with TemporaryDirectory(prefix="kills-") as directory, server as url:
            report = run_kills(
                Path(directory),
                kills=options.kills,
                streams=options.streams,
                backend=options.backend,
                database_url=new_database(url, "kills") if url else "",
                seed=options.seed,
            )
        print(f"\n{kind}, {options.backend} engine, {options.streams} streams\n\n{table(report)}\n")
        print("exact" if report.is_exact else f"NOT EXACT {report.lost} {report.wrong}", flush=True)
        is_exact &= report.is_exact
    return 0 if is_exact else 1


if __name__ == "__main__":
    sys.exit(main())
