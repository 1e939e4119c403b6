"""After a purge nothing of a workspace's content is left: in memory, files or the database."""

import os
import signal
import sqlite3
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from tokenizers import Tokenizer

from engine.cache.digests import pack
from scripts.stack import ADMIN_KEY, Stack, family, running_stack
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually
from tests.isolation.probes import ENGINE
from tests.isolation.test_kept_texts import PLAIN, ask_by_every_route

HOOK = Path(__file__).with_name("live_memory")
PURGED = "to-be-purged"
NEIGHBOUR = "next-to-it"
WORDS = {PURGED: "quokkaxylophonezebu", NEIGHBOUR: "narwhalbassoonokapi"}
KEPT = {
    "turn_contents": "body",
    "kept_responses": "body",
    "cached_contents": "body",
    "batch_rows": "params",
}
"""The tables that keep texts of clients, encrypted, and a column that has them."""


class House:
    def __init__(self, stack: Stack, folder: Path) -> None:
        self.stack = stack
        self.folder = folder
        self.admin = Admin(stack.gateway)
        self.keys: dict[str, str] = {}
        tokenizer = Tokenizer.from_file(str(folder / "tiny" / "tokenizer.json"))
        # As it stands between two of its kind, so that no other text begins or ends with it.
        self.tokens = {
            workspace: pack(tokenizer.encode(f" {word}", add_special_tokens=False).ids)
            for workspace, word in WORDS.items()
        }

    def live(self, needle: bytes) -> dict[str, list[str]]:
        """Where the processes' own objects hold these bytes, by the part of the product."""
        (self.folder / "live" / "needle").write_text(needle.hex())
        lines: dict[str, list[str]] = {"gateway": [], "engine": []}
        processes = {
            "gateway": self.stack.gateway_process,
            "engine": self.stack.engine_process,
        }
        for part, process in processes.items():
            for pid in family(process.pid):
                answer = self.folder / "live" / str(pid)
                answer.unlink(missing_ok=True)
                os.kill(pid, signal.SIGUSR2)
                eventually(answer.exists, seconds=120)
                lines[part] += answer.read_text().splitlines()
        return lines

    def files_with(self, needles: list[bytes]) -> set[str]:
        """The files of engine and gateway in which one of these stands."""
        return {
            path.relative_to(self.folder).as_posix()
            for part in ("data", "store", "logs")
            for path in (self.folder / part).rglob("*")
            if path.is_file() and any(needle in path.read_bytes() for needle in needles)
        }

    def ciphertexts(self, workspace: str) -> dict[str, list[bytes]]:
        """The beginnings of what the database keeps of a workspace, by table."""
        with closing(sqlite3.connect(self.folder / "data" / "ledger.db")) as db:
            of_batches = "batch_id IN (SELECT id FROM batches WHERE workspace_id = ?)"
            return {
                table: [
                    bytes(row[0])[:48]
                    for row in db.execute(
                        f"SELECT {column} FROM {table} WHERE "
                        + (of_batches if table == "batch_rows" else "workspace_id = ?"),
                        (workspace,),
                    )
                ]
                for table, column in KEPT.items()
            }


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    folder = tmp_path_factory.mktemp("purge")
    for part in ("data", "logs", "live"):
        (folder / part).mkdir()
    hooked = {"PYTHONPATH": str(HOOK), "LIVE_MEMORY": str(folder / "live")}
    engine_settings = {
        **ENGINE,
        **hooked,
        "ENGINE_MODEL": str(write_tiny_model(folder / "tiny")),
        "ENGINE_STORE": str(folder / "store"),
        "ENGINE_HOST_BLOCKS": "16384",
    }
    with running_stack(
        folder / "data",
        engine_settings=engine_settings,
        gateway_settings={**PLAIN, **hooked},
        logs=folder / "logs",
    ) as stack:
        house = House(stack, folder)
        for workspace, word in WORDS.items():
            house.admin.workspace(workspace, keep_days=30)
            _, house.keys[workspace] = house.admin.make_key(workspace)
            ask_by_every_route(stack.gateway, word, house.keys[workspace])
        yield house


@pytest.fixture(autouse=True)
def settled(house: House) -> None:
    """A lease of each workspace, and what was asked for is kept: tests come in any order."""
    for workspace, word in WORDS.items():
        marked(house.stack, house.keys[workspace], word)
        tokens = house.tokens[workspace]
        eventually(lambda: is_stored(house, tokens), seconds=60)  # noqa: B023 - called at once
    counts = [0]

    def is_settled() -> bool:
        time.sleep(2)
        ciphertexts = [house.ciphertexts(workspace) for workspace in WORDS]
        counts.append(sum(len(bodies) for tables in ciphertexts for bodies in tables.values()))
        return counts[-1] == counts[-2] > 0

    eventually(is_settled, seconds=60)


def is_stored(house: House, tokens: bytes) -> bool:
    return any("store/" in path for path in house.files_with([tokens]))


def marked(stack: Stack, key: str, word: str) -> None:
    """A lease, so that the store gets a copy."""
    block = {"type": "text", "text": f"{word} " * 300, "cache_control": {"type": "ephemeral"}}
    body = {"model": "holdfast-demo", "max_tokens": 2, "system": [block]}
    body["messages"] = [{"role": "user", "content": "q"}]
    headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
    reply = httpx.post(f"{stack.gateway}/v1/messages", json=body, headers=headers, timeout=120)
    assert reply.status_code == 200, reply.text
    assert reply.json()["holdfast"]["breakpoints"][0]["state"] == "leased"


def purge(house: House, status: int = 200, **what: str) -> dict[str, Any]:
    reply: dict[str, Any] = house.admin.post("purge", what, status)
    return reply


def test_a_purge_leaves_nothing_of_a_workspace_and_all_of_another(house: House) -> None:
    word = WORDS[PURGED].encode()
    tokens = house.tokens[PURGED]
    eventually(lambda: all(house.ciphertexts(PURGED).values()))
    ciphertexts = [body for bodies in house.ciphertexts(PURGED).values() for body in bodies]
    assert any(path.startswith("data/ledger.db") for path in house.files_with(ciphertexts))
    before = house.live(word)
    assert before["gateway"] and before["engine"], "the look finds what is there"
    assert house.live(tokens)["engine"]
    theirs = house.ciphertexts(NEIGHBOUR)

    report = purge(house, workspace=PURGED)
    assert report["left"] == []
    (engine,) = report["engines"]
    assert engine["purged"] and engine["busy_blocks"] == 0
    assert min(engine[kind] for kind in ("entries", "device_blocks", "files")) > 0
    assert min(report["database"].values()) > 0, report["database"]

    assert house.ciphertexts(PURGED) == {table: [] for table in KEPT}
    assert house.files_with([word, tokens, *ciphertexts]) == set()
    assert house.live(word) == {"gateway": [], "engine": []}
    assert house.live(tokens) == {"gateway": [], "engine": []}

    assert house.ciphertexts(NEIGHBOUR) == theirs
    assert any("store/" in path for path in house.files_with([house.tokens[NEIGHBOUR]]))
    again = purge(house, workspace=PURGED)
    assert {**again["database"], "journal": again["journal_contents"]} == {
        **dict.fromkeys(report["database"], 0),
        "journal": 0,
    }
    assert [again["engines"][0][kind] for kind in ("entries", "device_blocks", "files")] == [0] * 3

    def dropped() -> int:
        lost: int = house.admin.get("leases/kept")["lost"].get("dropped", 0)
        return lost

    # The ledger tells it as an operator's drop.
    eventually(lambda: dropped() > 0)


def test_a_models_purge_is_of_all_workspaces_and_of_engines_alone(house: House) -> None:
    theirs = house.ciphertexts(NEIGHBOUR)
    report = purge(house, model="holdfast-demo")
    (engine,) = report["engines"]
    assert engine["purged"] and engine["entries"] > 0 and engine["files"] > 0
    assert report["database"] == {} and house.ciphertexts(NEIGHBOUR) == theirs
    with house.stack.engine_client() as http:
        assert http.get("/v1/entries").json() == []
        blocks = http.get("/v1/stats").json()["blocks"]
    assert blocks["free"] == blocks["total"]


def test_who_may_not_purge_and_what_is_wrong_is_told(house: House) -> None:
    _, key = house.admin.make_key(NEIGHBOUR, scope="inference")
    assert Admin(house.stack.gateway, key).post("purge", {"workspace": NEIGHBOUR}, 403)
    for body, status in (
        ({}, 400),
        ({"workspace": NEIGHBOUR, "model": "holdfast-demo"}, 400),
        ({"workspace": "nobody"}, 404),
        ({"model": "no-model"}, 404),
    ):
        purge(house, status, **body)
    assert ADMIN_KEY not in (house.folder / "logs" / "gateway.log").read_text()


@pytest.mark.slow  # it is waited for, a minute
def test_an_engine_that_does_not_answer_is_not_taken_for_purged(house: House) -> None:
    process = house.stack.engine_process
    process.send_signal(signal.SIGSTOP)
    try:
        report = purge(house, workspace=NEIGHBOUR)
    finally:
        process.send_signal(signal.SIGCONT)
    (engine,) = report["engines"]
    assert engine["purged"] is False
    assert any("not known" in text for text in report["left"])
    eventually(lambda: purge(house, workspace=NEIGHBOUR)["left"] == [], seconds=60)
