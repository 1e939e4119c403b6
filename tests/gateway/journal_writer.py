"""A program to be killed: opens and closes turns as fast as it can, says which are durable."""

import asyncio
import sys
from datetime import UTC, datetime
from pathlib import Path

from gateway.base.record import TurnRecord
from gateway.journal.store import Journal


async def write(journal: Journal, worker: int) -> None:
    for number in range(1_000_000):
        record = TurnRecord(
            id=f"msg_{journal.instance}{worker:02}{number:06}",
            instance=journal.instance,
            workspace="default",
            key_id="key",
            model="m",
            stream=False,
            opened_at=datetime.now(UTC),
        )
        await journal.open(record)
        print("open", record.id, flush=True)
        record.outcome, record.output_tokens = "stop", number
        await journal.close(record)
        print("closed", record.id, number, flush=True)


async def main() -> None:
    journal = Journal(Path(sys.argv[1])).start()
    await asyncio.gather(*(write(journal, worker) for worker in range(8)))


asyncio.run(main())
