"""`python -m gateway retain` keeps what the limits of the running month are counted from."""

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from gateway.cli.main import main
from gateway.ledger.access import Workspaces
from gateway.ledger.database import Ledger, with_ledger
from tests.gateway.records import turn_record
from tests.gateway.serving import fill, make_settings

DOLLAR = 10**9


def test_the_months_spend_is_the_same_before_and_after_retention(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = make_settings(tmp_path)
    monkeypatch.setenv("HOLDFAST_DATA", str(tmp_path))
    now = datetime.now(UTC)
    month = now.replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    turns = [
        turn_record(
            f"msg_{number:04}",
            workspace="default",
            opened_at=now - timedelta(days=number / 2),
            outcome="stop",
            cost=DOLLAR,
        )
        for number in range(120)
    ]
    fill(settings, turns)

    def spent() -> dict[str, int]:
        def look(ledger: Ledger) -> Any:
            return Workspaces(ledger).spent(["default"], month)

        return dict(asyncio.run(with_ledger(settings.ledger_url, look)))

    before = spent()
    of_month = sum(turn.opened_at >= month for turn in turns)
    assert before == {"default": of_month * DOLLAR}
    assert main(["retain", "--turns", "2d", "--rollups", "2d"]) == 0
    assert "deleted" in capsys.readouterr().out
    assert spent() == before
