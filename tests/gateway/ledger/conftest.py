import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.base.settings import DatabaseSettings
from gateway.ledger.database import Ledger
from tests.migrated import migrate


@pytest.fixture
async def ledger(tmp_path: Path, shared_database: str) -> AsyncIterator[Ledger]:
    """An empty ledger, on either database."""
    settings = DatabaseSettings(data=tmp_path, database_url=shared_database)
    await asyncio.to_thread(migrate, settings)
    ledger = Ledger(settings.ledger_url, 60.0)
    yield ledger
    await ledger.close()
