"""How long a month of turns takes to be advised: CPU time of reading the ledger and comparing.

python -m scripts.bench.advice --turns 60000
"""

import asyncio
import gc
import resource
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

from gateway.admin.advise import DEFAULT_MIN_TOKENS, MAX_TURNS, Gathering
from gateway.advice.stream import advise_stream
from gateway.ledger.database import Ledger, with_ledger
from gateway.ledger.reads.observed import observed
from gateway.ledger.reads.ranges import Range
from gateway.prices.files import load_prices
from gateway.sample.month import Month
from scripts.setup.database import migrate
from scripts.setup.options import new_parser

_BATCH = 1000
_ALL_MS = 253_402_300_799_000
_LIMIT_SECONDS = 5.0


def main() -> int:
    parser = new_parser(__doc__)
    parser.add_argument("--turns", type=int, default=MAX_TURNS)
    num_turns = parser.parse_args().turns
    with tempfile.TemporaryDirectory() as directory:
        url = f"sqlite+aiosqlite:///{directory}/ledger.db"
        migrate({"HOLDFAST_DATA": directory, "HOLDFAST_DATABASE_URL": url})
        asyncio.run(with_ledger(url, lambda ledger: _fill(ledger, num_turns)))
        size = Path(directory, "ledger.db").stat().st_size
        print(f"a made-up month in a ledger of {size / 1e6:,.0f} MB")
        gc.collect()
        # As the gateway's process has it.
        gc.freeze()
        gc.set_threshold(20_000, 50, 50)
        began, cpu = time.perf_counter(), time.process_time()
        gathering = Gathering(load_prices())
        asyncio.run(with_ledger(url, lambda ledger: _gather(ledger, gathering)))
        read = time.process_time() - cpu
        streams = gathering.largest()
        advices = [advise_stream(turns, DEFAULT_MIN_TOKENS) for _, turns in streams]
        took, cpu = time.perf_counter() - began, time.process_time() - cpu
    for advice in advices:
        faults = ", ".join(f"{each.kind} at {each.path}" for each in advice.findings)
        print(f"  {advice.workspace:14} {advice.num_turns:7,} {advice.verdict:6} {faults}")
    turns = sum(advice.num_turns for advice in advices)
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(
        f"{turns:,} turns: {cpu:.2f} s of CPU ({read:.2f} s reading the ledger), {took:.2f} s,"
        f" at most {memory:,.0f} MB"
    )
    return 0 if cpu <= _LIMIT_SECONDS else 1


async def _fill(ledger: Ledger, num_turns: int) -> None:
    month = Month(datetime(2026, 11, 22, tzinfo=UTC), num_turns, 7, load_prices())
    batch = []
    for record in month.records():
        batch.append(record)
        if len(batch) == _BATCH:
            await ledger.insert_turns(batch)
            batch = []
    if batch:
        await ledger.insert_turns(batch)


async def _gather(ledger: Ledger, gathering: Gathering) -> None:
    of = Range(since_ms=0, until_ms=_ALL_MS)
    async for rows in observed(ledger, of, None, MAX_TURNS):
        gathering.take(rows)


if __name__ == "__main__":
    sys.exit(main())
