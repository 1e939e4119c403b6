"""A workspace's own key lists what it has cached, and lets go of it before its time."""

import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench.load import marked
from tests.e2e.fleet import Fleet, Gateway, running_fleet
from tests.e2e.prompts import handbook
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

PATH = "/v1/cache/entries"
UNKNOWN = "0" * 32
WORKSPACES = ("mine", "theirs")


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    data = tmp_path_factory.mktemp("entries")
    settings = {"ENGINE_MIN_CACHE_TOKENS": "64"}
    with running_fleet(data, num_engines=2, settings=settings) as running:
        yield running


@pytest.fixture(scope="module")
def keys(fleet: Fleet) -> dict[str, str]:
    admin = Admin(fleet.gateway.url)
    for workspace in WORKSPACES:
        admin.workspace(workspace)
    return {name: admin.make_key(name)[1] for name in WORKSPACES}


def call(
    fleet: Fleet, key: str, method: str = "GET", path: str = PATH, **headers: str
) -> httpx.Response:
    return httpx.request(
        method,
        fleet.gateway.url + path,
        headers={"authorization": f"Bearer {key}", **headers},
        timeout=120,
        trust_env=False,
    )


def hold(fleet: Fleet, key: str, ttl: str = "1h", rules: int = 30) -> dict[str, Any]:
    gateway = Gateway(fleet.gateway.url, workspace_key=key)
    return gateway.answer(marked(handbook(rules), ttl))


def listed(fleet: Fleet, key: str, query: str = "") -> list[dict[str, Any]]:
    reply = call(fleet, key, path=PATH + query)
    assert reply.status_code == 200, reply.text
    page: dict[str, Any] = reply.json()
    assert (page["object"], page["unreached_engines"]) == ("list", 0)
    return list(page["data"])


def test_a_lease_is_found_by_its_answer_and_ended(fleet: Fleet, keys: dict[str, str]) -> None:
    text = marked(handbook(40), "1h")
    gateway = Gateway(fleet.gateway.url, workspace_key=keys["mine"])
    answer = gateway.answer(text)
    eventually(lambda: Admin(fleet.gateway.url).has(answer["id"]))
    (entry,) = listed(fleet, keys["mine"], f"?message_id={answer['id']}")
    breakpoint = answer["holdfast"]["breakpoints"][0]
    assert (entry["state"], entry["ttl"], entry["tokens"]) == ("leased", "1h", breakpoint["tokens"])
    assert 0 < entry["expires_in_seconds"] <= 3600
    assert entry in [{**listing, **_moving(entry)} for listing in listed(fleet, keys["mine"])]
    before = fleet.gateway.get("leases/kept")

    gone = call(fleet, keys["mine"], "DELETE", f"{PATH}/{entry['id']}")
    assert gone.json() == {
        "id": entry["id"],
        "object": "cache.entry",
        "deleted": True,
        "unreached_engines": 0,
    }
    assert entry["id"] not in [listing["id"] for listing in listed(fleet, keys["mine"])]
    again = gateway.answer(text)
    assert again["usage"]["cache_read_input_tokens"] == 0
    assert again["holdfast"]["miss_reason"] == "dropped"

    # No promise was broken: the ledger tells it apart from what an operator did.
    def released() -> int:
        count: int = fleet.gateway.get("leases/kept")["released"]
        return count

    eventually(lambda: released() == before["released"] + 1)
    assert fleet.gateway.get("leases/kept")["lost"] == before["lost"]


def said(reply: httpx.Response, entry_id: str) -> str:
    """What a refusal says, whatever was asked for."""
    message: str = reply.json()["error"]["message"]
    return message.replace(entry_id, "ID")


def _moving(entry: dict[str, Any]) -> dict[str, Any]:
    return {"expires_in_seconds": entry["expires_in_seconds"]}


def test_pages_have_each_entry_once_and_both_engines(fleet: Fleet, keys: dict[str, str]) -> None:
    for number in (0, 1):
        fleet.gateway.use(1 - number, "drain")
        for _ in range(4):
            hold(fleet, keys["mine"])
        fleet.gateway.use(1 - number, "resume")
    whole = [entry["id"] for entry in listed(fleet, keys["mine"])]
    assert len(whole) >= 8 and whole == sorted(set(whole))
    pages = []
    after = ""
    while True:
        reply = call(fleet, keys["mine"], path=f"{PATH}?limit=3{after}").json()
        ids = [entry["id"] for entry in reply["data"]]
        assert (reply["first_id"], reply["last_id"]) == (ids[0], ids[-1])
        pages += ids
        if not reply["has_more"]:
            break
        assert len(ids) == 3
        after = f"&after_id={reply['last_id']}"
    assert pages == whole


def test_another_workspaces_entry_is_as_one_that_is_not_there(
    fleet: Fleet, keys: dict[str, str]
) -> None:
    answer = hold(fleet, keys["theirs"])
    eventually(lambda: Admin(fleet.gateway.url).has(answer["id"]))
    (entry,) = listed(fleet, keys["theirs"], f"?message_id={answer['id']}")
    assert entry["id"] not in [listing["id"] for listing in listed(fleet, keys["mine"])]
    by_message = call(fleet, keys["mine"], path=f"{PATH}?message_id={answer['id']}")
    by_nothing = call(fleet, keys["mine"], path=f"{PATH}?message_id=msg_{28 * '0'}")
    assert (by_message.status_code, by_nothing.status_code) == (404, 404)
    assert said(by_message, answer["id"]) == said(by_nothing, f"msg_{28 * '0'}")

    seconds: dict[str, list[float]] = {entry["id"]: [], UNKNOWN: []}
    messages = set()
    for _ in range(25):
        for wanted, taken in seconds.items():
            began = time.perf_counter()
            reply = call(fleet, keys["mine"], "DELETE", f"{PATH}/{wanted}")
            taken.append(time.perf_counter() - began)
            assert reply.status_code == 404
            messages.add(said(reply, wanted))
    assert len(messages) == 1
    medians = [statistics.median(taken) for taken in seconds.values()]
    assert max(medians) < 2 * min(medians) + 0.01
    assert [
        listing["state"] for listing in listed(fleet, keys["theirs"], f"?message_id={answer['id']}")
    ]


def test_who_may_not_ask_and_what_is_wrong_is_told_in_the_clients_dialect(
    fleet: Fleet, keys: dict[str, str]
) -> None:
    admin = Admin(fleet.gateway.url)
    _, read_only = admin.make_key("mine", scope="read_only")
    entry_path = f"{PATH}/{UNKNOWN}"
    for method, path in (("GET", PATH), ("DELETE", entry_path)):
        assert call(fleet, "hf-nobody", method, path).status_code == 401
        assert call(fleet, read_only, method, path).status_code == 403
        assert call(fleet, admin.key, method, path).status_code == 401
    as_openai = call(fleet, keys["mine"], "DELETE", entry_path)
    as_anthropic = call(
        fleet, keys["mine"], "DELETE", entry_path, **{"anthropic-version": "2023-06-01"}
    )
    as_google = call(fleet, keys["mine"], "DELETE", entry_path, **{"x-goog-api-key": keys["mine"]})
    assert as_openai.json()["error"]["message"] == as_anthropic.json()["error"]["message"]
    assert as_anthropic.json()["type"] == "error"
    assert as_google.json()["error"]["status"] == "NOT_FOUND"
    for query, field in (
        ("?limit=0", "limit"),
        ("?limit=1001", "limit"),
        ("?after_id=x", "after_id"),
        ("/xyz", "id"),
    ):
        method = "DELETE" if query.startswith("/") else "GET"
        reply = call(fleet, keys["mine"], method, PATH + query)
        assert reply.status_code == 400
        assert reply.json()["error"]["message"].startswith(f"{field}: must be ")


@pytest.mark.timeout(300)
def test_an_engine_that_does_not_answer_is_not_taken_for_one_without_the_entry(
    tmp_path: Path,
) -> None:
    with running_fleet(
        tmp_path, num_engines=2, settings={"ENGINE_MIN_CACHE_TOKENS": "64"}
    ) as fleet:
        key = fleet.gateway.workspace_key
        fleet.gateway.use(0, "drain")
        hold(fleet, key)
        fleet.gateway.use(0, "resume")
        (entry,) = listed(fleet, key)
        fleet.processes[1].send_signal(signal.SIGSTOP)
        try:
            eventually(lambda: fleet.num_ready() == 1)
            page = call(fleet, key).json()
            assert (page["data"], page["unreached_engines"]) == ([], 1)
            refused = call(fleet, key, "DELETE", f"{PATH}/{entry['id']}")
            assert refused.status_code in (503, 529), refused.text
            assert "ask again" in refused.text
        finally:
            fleet.processes[1].send_signal(signal.SIGCONT)
        eventually(lambda: fleet.num_ready() == 2)
        assert call(fleet, key, "DELETE", f"{PATH}/{entry['id']}").status_code == 200
