"""Limits over three gateways, one of which is killed; FAULTS=full does it for minutes."""

import os
from pathlib import Path

import pytest

from tests.faults.limits import ALLOWED, measure

SECONDS = 120.0 if os.environ.get("FAULTS") == "full" else 15.0


@pytest.mark.postgres
def test_three_gateways_let_no_more_through_than_one(tmp_path: Path, postgres: str) -> None:
    found = measure(tmp_path, postgres, SECONDS, clients=6, seed=1)
    for name, (share, seen) in found.items():
        assert seen.turns and share <= ALLOWED, f"{name}: {share:.3f} of the limit was let through"
