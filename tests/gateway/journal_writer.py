"""A program to be killed: opens and closes turns as fast as it can, says which are durable."""

import asyncio
import sys
from pathlib import Path

from gateway.journal.store import Journal
from tests.gateway.records import turn_record


async def write(journal: Journal, worker: int) -> None:
    for number in range(1_000_000):
        name = f"msg_{journal.instance}{worker:02}{number:06}"
        record = turn_record(name, instance=journal.instance)
        await journal.open(record)
        print("open", record.id, flush=True)
        record.outcome = "stop"
        record.output_tokens = number
        await journal.close(record)
        print("closed", record.id, number, flush=True)


async def main() -> None:
    journal = Journal(Path(sys.argv[1])).start()
    await asyncio.gather(*(write(journal, worker) for worker in range(8)))


asyncio.run(main())
