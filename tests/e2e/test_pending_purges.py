"""An engine that was away during a purge has nothing of it when it gets turns again."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from scripts.bench.load import marked
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.prompts import handbook
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

PURGED = "to-be-purged"
NEIGHBOUR = "next-to-it"


def clients(fleet: Fleet) -> Mapping[str, Gateway]:
    admin = Admin(fleet.gateway.url)
    for workspace in (PURGED, NEIGHBOUR):
        admin.workspace(workspace)
    return {
        workspace: replace(fleet.gateway, workspace_key=admin.make_key(workspace)[1])
        for workspace in (PURGED, NEIGHBOUR)
    }


def store_leases(fleet: Fleet) -> int:
    leases: int = fleet.stats(1)["store"]["leases"]
    return leases


def pending(fleet: Fleet) -> list[dict[str, Any]]:
    conditions: list[dict[str, Any]] = fleet.gateway.get("conditions")
    return [condition for condition in conditions if condition["kind"] == "purge_pending"]


def read_tokens(answer: Mapping[str, Any]) -> int:
    tokens: int = answer["usage"]["cache_read_input_tokens"]
    return tokens


def test_an_engine_that_was_away_purges_before_it_gets_turns(
    tmp_path: Path, shared_database: str
) -> None:
    per_engine = ({}, {"ENGINE_STORE": str(tmp_path / "store")})
    with running_fleet(
        tmp_path,
        num_engines=2,
        settings={"ENGINE_MIN_CACHE_TOKENS": "64"},
        gateway_settings={"HOLDFAST_DATABASE_URL": shared_database},
        per_engine=per_engine,
    ) as fleet:
        by_workspace = clients(fleet)
        fleet.gateway.use(0, "drain")
        texts = {name: marked(f"{name} {handbook(40)}", "1h") for name in by_workspace}
        for name, client in by_workspace.items():
            assert read_tokens(client.answer(texts[name])) == 0
        eventually(lambda: store_leases(fleet) == 2, seconds=60)
        fleet.gateway.use(0, "resume")
        fleet.kill(1)
        eventually(lambda: fleet.num_ready() == 1)

        report = fleet.gateway.post("purge", {"workspace": PURGED})
        engines = {engine["engine"]: engine for engine in report["engines"]}
        assert (engines["engine-0"]["purged"], engines["engine-0"]["pending"]) == (True, False)
        assert (engines["engine-1"]["purged"], engines["engine-1"]["pending"]) == (False, True)
        assert any(text.startswith("pending for engine-1: ") for text in report["left"])
        eventually(lambda: len(pending(fleet)) == 1)
        (condition,) = pending(fleet)
        assert condition["engine"] == "engine-1" and f"`{PURGED}`" in condition["cause"]

        fleet.restart(1)
        eventually(lambda: fleet.num_ready() == 2)
        assert store_leases(fleet) == 1
        eventually(lambda: pending(fleet) == [])
        fleet.gateway.use(0, "drain")
        assert read_tokens(by_workspace[PURGED].answer(texts[PURGED])) == 0
        assert read_tokens(by_workspace[NEIGHBOUR].answer(texts[NEIGHBOUR])) > 0
        # It was done once: what came since stays over the next restart.
        eventually(lambda: store_leases(fleet) == 2, seconds=60)
        fleet.kill(1)
        fleet.restart(1)
        eventually(lambda: fleet.gateway.engine(1)["status"] == "ready")
        assert read_tokens(by_workspace[PURGED].answer(texts[PURGED])) > 0
