from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gateway.journal.store import Journal
from tests.gateway.serving import make_settings
from tests.migrated import migrate


@pytest.fixture
async def journal(tmp_path: Path) -> AsyncIterator[Journal]:
    running = Journal(tmp_path).start()
    yield running
    await running.stop()


@pytest.fixture
def ledger_url(tmp_path: Path) -> str:
    """Of an empty ledger beside the journal."""
    settings = make_settings(tmp_path)
    migrate(settings)
    return settings.ledger_url
