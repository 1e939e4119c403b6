"""`kill -9` of one of four engines, 50 times under load: no client need know before its first byte.

Clients with the official SDKs, retries off, ask one gateway before four synthetic engines, as
streams and as single answers of both dialects. One engine after the other is killed and started
again as a new epoch; some rounds let it hang (SIGSTOP) instead. In the end what the clients were
told is compared with the ledger, and the ledger with the engines' books. Ends with 1 unless no
request failed before its first byte, every broken stream ended with an error event, and the ledger
is complete.
"""

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from scripts.setup.options import parse
from tests.e2e.engine_kills import run_engine_kills
from tests.e2e.kills import table


def main() -> int:
    options = parse(__doc__, kills=(50, "rounds, hangs among them"), hangs=10, clients=32, seed=1)
    with TemporaryDirectory(prefix="engine-kills-") as directory:
        report = run_engine_kills(Path(directory), **vars(options))
    print(f"\n4 synthetic engines, {options.clients} clients\n\n{table(report)}\n")
    for name, value in report.problems.items():
        print(f"{name}: {value}")
    print("complete" if not report.problems else "NOT COMPLETE", flush=True)
    return 1 if report.problems else 0


if __name__ == "__main__":
    sys.exit(main())
