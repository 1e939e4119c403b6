"""A lease that ended before its time counts, whatever became of who could tell of its end."""

from pathlib import Path
from typing import Any

import pytest

from scripts.bench.load import marked
from tests.e2e.fleet import Fleet, running_fleet
from tests.gateway.serving import eventually

ENGINE = {"ENGINE_MIN_CACHE_TOKENS": "64"}


def hold(fleet: Fleet, *names: str) -> None:
    """A lease of an hour for each name. The answer says so."""
    for name in names:
        system = marked(f"The handbook of {name}. " + "A rule that holds. " * 60, "1h")
        usage = fleet.gateway.answer(system)["usage"]
        assert usage["cache_creation"]["ephemeral_1h_input_tokens"] > 0


def kept(fleet: Fleet, **filters: str) -> dict[str, Any]:
    query = "&".join(f"{name}={value}" for name, value in filters.items())
    shares: dict[str, Any] = fleet.gateway.get(f"leases/kept?{query}")
    return shares


def lost(fleet: Fleet) -> tuple[dict[str, int], int]:
    shares = kept(fleet)
    return shares["lost"], shares["not_known"]


@pytest.mark.timeout(600)
def test_leases_of_a_killed_engine_are_not_known_and_then_lost(tmp_path: Path) -> None:
    with running_fleet(tmp_path, settings=ENGINE) as fleet:
        hold(fleet, "one", "two")
        fleet.kill()
        eventually(lambda: lost(fleet) == ({}, 2))
        silent = kept(fleet)
        assert silent["not_known_since_ms"] is not None
        assert silent["held"] == silent["expired"] == 0

        fleet.restart()
        eventually(lambda: lost(fleet) == ({"restart": 2}, 0))
        hold(fleet, "one")
        eventually(lambda: kept(fleet)["held"] == 1)
        fleet.kill()
        eventually(lambda: lost(fleet) == ({"restart": 2}, 1))
        fleet.restart()
        eventually(lambda: lost(fleet) == ({"restart": 3}, 0))

        # A range in which nothing ended has none of them, and another engine had none.
        assert kept(fleet, until_ms=str(silent["since_ms"]))["lost"] == {}
        assert kept(fleet, engine="another")["lost"] == {}


@pytest.mark.timeout(600)
def test_leases_that_a_store_brings_back_are_not_lost(tmp_path: Path) -> None:
    settings = ENGINE | {"ENGINE_STORE": str(tmp_path / "store")}
    with running_fleet(tmp_path, settings=settings) as fleet:
        hold(fleet, "one", "two")
        eventually(lambda: fleet.stats()["store"]["leases"] == 2)
        fleet.kill()
        eventually(lambda: lost(fleet) == ({}, 2))
        fleet.restart()
        eventually(lambda: kept(fleet)["held"] == 2)
        assert lost(fleet) == ({}, 0)


@pytest.mark.timeout(600)
def test_leases_of_an_engine_that_is_removed_while_it_is_down_are_lost(tmp_path: Path) -> None:
    with running_fleet(tmp_path, settings=ENGINE) as fleet:
        hold(fleet, "one")
        fleet.kill()
        eventually(lambda: lost(fleet) == ({}, 1))
        fleet.gateway.delete("engines/engine-0")
        assert lost(fleet) == ({"engine_lost": 1}, 0)


@pytest.mark.timeout(600)
def test_leases_that_live_to_their_end_or_are_dropped_are_told_so(tmp_path: Path) -> None:
    with running_fleet(tmp_path, settings=ENGINE | {"ENGINE_CLOCK": "manual"}) as fleet:
        hold(fleet, "one", "two", "three")
        first = fleet.gateway.get("leases?limit=1")[0]
        place = f"workspace={first['workspace']}&engine={first['engine']}"
        fleet.gateway.delete(f"leases/{first['entry']['entry']}?{place}")
        fleet.advance(4000)
        eventually(lambda: kept(fleet)["expired"] == 2)
        assert lost(fleet) == ({"dropped": 1}, 0)
        # What was counted stays when the engine that counted is gone.
        fleet.kill()
        fleet.restart()
        eventually(lambda: fleet.num_ready() == 1)
        assert kept(fleet)["expired"] == 2
        assert lost(fleet) == ({"dropped": 1}, 0)
