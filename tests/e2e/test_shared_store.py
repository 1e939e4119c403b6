"""Two native engines that share a store, behind a real gateway: what one wrote the other loads."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.load import marked
from tests.e2e.engine_kills import kill_in
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.prompts import handbook
from tests.gateway.serving import eventually


def settings_of(data: Path) -> dict[str, str]:
    return {
        "ENGINE_STORE": str(data / "store"),
        "ENGINE_STORE_SHARED": "true",
        "ENGINE_MIN_CACHE_TOKENS": "64",
        "ENGINE_NUM_BLOCKS": "2048",
    }


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    data = tmp_path_factory.mktemp("shared-store")
    with running_fleet(data, 2, 1, settings_of(data), backend="native") as running:
        yield running


@pytest.fixture
def fleet(shared: Fleet) -> Fleet:
    return shared.restored()


def ask(gateway: Gateway, system: str) -> dict[str, Any]:
    """A turn over a system prompt that is marked for an hour, always with the same question."""
    return gateway.answer(marked(system, "1h"), "Why?", temperature=0.0)


def all_known(fleet: Fleet) -> bool:
    """Whether the gateway knows what each engine holds."""
    known = [fleet.gateway.engine(number)["routing"]["names"] for number in (0, 1)]
    return known == [len(fleet.held_names(number)) for number in (0, 1)]


def write(fleet: Fleet, system: str, onto: int) -> tuple[dict[str, Any], set[str]]:
    """Have a prompt written on one engine, and wait until the other has heard of it.

    Return the answer, and the names of what both can read.
    """
    gateway = fleet.gateway
    elsewhere = 1 - onto
    before = fleet.held_names(elsewhere)
    gateway.use(elsewhere, "drain")
    answer = ask(gateway, system)
    assert answer["holdfast"]["engine"] == f"engine-{onto}"
    assert not answer["usage"]["cache_read_input_tokens"]
    gateway.use(elsewhere, "resume")
    names: set[str] = set()

    def is_told() -> bool:
        names.update((fleet.held_names(elsewhere) - before) & fleet.held_names(onto))
        return bool(names) and all_known(fleet)

    eventually(is_told)
    return answer, names


def places(fleet: Fleet, number: int, names: set[str]) -> set[tuple[str, bool]]:
    """In which tiers an engine holds these names, and whether under a lease."""
    return {
        (chain.get("tier", "device"), bool(chain.get("num_leased", 0)))
        for chain in fleet.chains(number)
        if names & {name["digest"] for name in chain["names"]}
    }


def check_loaded(first: dict[str, Any], again: dict[str, Any], engine: str) -> None:
    """The second answer is the first one, of another engine that read all that was written."""
    usage = again["usage"]
    holdfast = again["holdfast"]
    written_tokens = first["usage"]["cache_creation_input_tokens"]
    assert holdfast["engine"] == engine and holdfast["read_tier"] == "disk"
    assert usage["cache_read_input_tokens"] == written_tokens > 1000
    assert usage["cache_creation_input_tokens"] == 0
    assert usage["input_tokens"] == first["usage"]["input_tokens"]
    prompt = written_tokens + usage["input_tokens"]
    assert holdfast["computed_tokens"] + holdfast["automatic_tokens"] == prompt - written_tokens
    assert again["content"] == first["content"]


def test_what_one_engine_wrote_the_other_loads_and_the_gateway_knows_it(fleet: Fleet) -> None:
    gateway = fleet.gateway
    system = handbook(80)
    first, names = write(fleet, system, onto=0)
    assert places(fleet, 0, names) == {("device", True)}
    assert places(fleet, 1, names) == {("disk", False)}, "nothing of that engine holds it"
    near = ask(gateway, system)["holdfast"]
    assert (near["engine"], near["read_tier"]) == ("engine-0", "device"), "it has it at hand"
    gateway.use(0, "drain")
    again = ask(gateway, system)
    gateway.use(0, "resume")
    check_loaded(first, again, "engine-1")
    assert again["holdfast"]["breakpoints"][0]["state"] == "leased"
    row = gateway.recorded(again["id"])
    assert row["cache_read_tokens"] == again["usage"]["cache_read_input_tokens"]
    assert row["available_tokens"] == row["captured_tokens"] > row["cache_read_tokens"] - 16
    assert fleet.stats(1)["store"]["peer_read_bytes"] > 0
    assert places(fleet, 1, names) == {("device", True)}


def test_what_a_killed_engine_wrote_is_read_by_the_other_and_by_its_successor(fleet: Fleet) -> None:
    gateway = fleet.gateway
    system = handbook(80)
    first, names = write(fleet, system, onto=1)
    fleet.kill(1)
    check_loaded(first, ask(gateway, system), "engine-0")
    fleet.restart(1)
    eventually(fleet.all_ready)
    assert places(fleet, 1, names) == {("disk", True)}
    gateway.use(0, "drain")
    check_loaded(first, ask(gateway, system), "engine-1")


def test_a_kill_under_load_loses_no_turn_and_no_count(fleet: Fleet) -> None:
    report = kill_in(fleet, kills=1, clients=6, max_tokens=12)
    assert not report.problems, report
    assert report.asked == report.completed + report.broken and report.completed
