"""The moment before which turns may have been deleted; their sums are kept longer."""

from sqlalchemy import select
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.ledger.schema import HorizonRow


async def horizon_ms(connection: AsyncConnection) -> int:
    """The moment from which the turns are complete. 0 if none were deleted."""
    found = (await connection.execute(select(HorizonRow.turns_ms))).scalar_one_or_none()
    return found or 0
