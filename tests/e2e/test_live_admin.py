"""What the admin API says of a real engine's memory and leases, and that a drop is carried out."""

from collections.abc import Iterator
from typing import Any

import pytest

from scripts.bench.load import marked
from scripts.stack import Stack, running_stack
from tests.e2e.fleet import Gateway
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

SYSTEM = "The handbook of the lighthouse keeper. " * 200


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    data = tmp_path_factory.mktemp("live")
    with running_stack(data, "synthetic") as running:
        yield running


@pytest.fixture(scope="module")
def keys(stack: Stack) -> dict[str, str]:
    admin = Admin(stack.gateway)
    for workspace in ("mine", "theirs"):
        admin.workspace(workspace)
    return {name: admin.make_key(name)[1] for name in ("mine", "theirs")}


def send(stack: Stack, key: str, text: str = SYSTEM, ttl: str = "5m") -> dict[str, Any]:
    return Gateway(stack.gateway, workspace_key=key).answer(marked(text, ttl), "What is a lease?")


def leases(stack: Stack, workspace: str) -> list[Any]:
    entries: list[Any] = Admin(stack.gateway).get(f"leases?workspace={workspace}")
    return entries


def test_the_engine_lists_the_entries_of_one_scope(stack: Stack, keys: dict[str, str]) -> None:
    """A workspace's own look at its leases does not make the engine write down all others'."""
    for workspace in ("mine", "theirs"):
        send(stack, keys[workspace], f"Of {workspace}. " + SYSTEM)
    with stack.engine_client() as http:
        everything = http.get("/v1/entries").json()
        scopes = {row["scope"] for row in everything}
        assert len(scopes) == 2
        for scope in scopes:
            entries = http.get(f"/v1/entries?scope={scope}").json()
            of_scope = [row["entry"] for row in everything if row["scope"] == scope]
            assert sorted(entry["entry"] for entry in entries) == sorted(of_scope)
            assert {entry["scope"] for entry in entries} == {scope}
        assert http.get("/v1/entries?scope=unknown").json() == []


def test_a_lease_that_is_dropped_is_gone_in_the_engine(stack: Stack, keys: dict[str, str]) -> None:
    before = [lease["entry"]["entry"] for lease in leases(stack, "theirs")]
    send(stack, keys["theirs"], "Dropped. " + SYSTEM)
    (lease,) = [lease for lease in leases(stack, "theirs") if lease["entry"]["entry"] not in before]
    entry = lease["entry"]["entry"]
    engine = lease["engine"]
    for name, key in keys.items():
        assert {lease["workspace"] for lease in Admin(stack.gateway, key).get("leases")} <= {name}
    admin = Admin(stack.gateway)

    def drop(workspace: str, status: int, which: str = entry, key: Admin = admin) -> Any:
        path = f"leases/{which}?workspace={workspace}&engine={engine}"
        return key.delete(path, status)

    drop("mine", 404)
    drop("theirs", 400, "xyz")
    drop("theirs", 403, key=Admin(stack.gateway, keys["theirs"]))
    entry_ids = [lease["entry"]["entry"] for lease in leases(stack, "theirs")]
    assert sorted(entry_ids) == sorted([*before, entry]), "still there"
    with stack.engine_client() as http:
        dropped = http.get("/v1/stats").json()["counters"]["leases_dropped"]
        assert drop("theirs", 200) == {"engine": engine, "workspace": "theirs", "entry": entry}
        assert entry not in [listing["entry"] for listing in http.get("/v1/entries").json()]
        assert http.get("/v1/stats").json()["counters"]["leases_dropped"] == dropped + 1
    drop("theirs", 404)
    again = send(stack, keys["theirs"], "Dropped. " + SYSTEM)
    assert again["usage"]["cache_read_input_tokens"] == 0
    assert again["holdfast"]["miss_reason"] == "dropped"


def test_samples_and_history_are_of_the_turns_that_were(stack: Stack, keys: dict[str, str]) -> None:
    answer = send(stack, keys["mine"], "Sampled. " + SYSTEM)
    mine = Admin(stack.gateway, keys["mine"])
    admin = Admin(stack.gateway)

    def sampled() -> Any:
        return {sample["id"]: sample for sample in mine.get("latency/samples")["samples"]}

    eventually(lambda: answer["id"] in sampled())
    turn = sampled()[answer["id"]]
    usage = answer["usage"]
    written_tokens = usage["cache_creation_input_tokens"]
    assert turn["prompt_tokens"] == usage["input_tokens"] + written_tokens
    assert turn["first_token_seconds"] > 0 and turn["overhead_seconds"] >= 0
    assert answer["id"] not in {
        sample["id"]
        for sample in Admin(stack.gateway, keys["theirs"]).get("latency/samples")["samples"]
    }
    history = admin.get("engines/history")
    assert history["restarts"] == []
    assert {period["engine"] for period in history["attribution"]} == {None, "engine-0"}
