"""Who fills the memory: the page's figures against a count of usage fields made outside, against
plain SQL and against the engine's own pool."""

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from scripts.bench.load import MESSAGES, body_of, headers_of, marked
from scripts.stack import ADMIN_KEY
from tests.dashboard.conftest import Show
from tests.dashboard.ledgers import rows
from tests.dashboard.signed_in import said, table
from tests.dashboard.test_figures import card
from tests.e2e.fleet import running_fleet
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

BLOCK = 16
NUM_BLOCKS = 2000
RULES = "The lamp burns. " * 300


@dataclass
class Sent:
    gateway: str
    data: Path
    blocks: Counter[tuple[str, str]] = field(default_factory=Counter)
    """By workspace and key: what each request's usage says that it added to the memory."""

    def turn(self, workspace: str, name: str, key: str, system: list[Any], question: str) -> None:
        body = body_of("synthetic", system, question, max_tokens=1)
        reply = httpx.post(
            f"{self.gateway}{MESSAGES}", json=body, headers=headers_of(key), timeout=120
        )
        usage = reply.raise_for_status().json()["usage"]
        read_tokens = usage["cache_read_input_tokens"]
        written_tokens = usage["cache_creation_input_tokens"]
        assert written_tokens
        self.blocks[workspace, name] += added(read_tokens, written_tokens)


def added(read_tokens: int, written_tokens: int) -> int:
    """Whole blocks of what is read are shared; the rest of a marked prefix has its own."""
    return -(-(read_tokens + written_tokens) // BLOCK) - read_tokens // BLOCK


@pytest.fixture(scope="module")
def traffic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sent]:
    data = tmp_path_factory.mktemp("memory-figures")
    settings = {
        "ENGINE_NUM_BLOCKS": str(NUM_BLOCKS),
        "ENGINE_BLOCK_SIZE": str(BLOCK),
        "ENGINE_MIN_CACHE_TOKENS": "64",
    }
    with running_fleet(data, settings=settings) as fleet:
        admin = fleet.gateway
        keys = {}
        traffic = Sent(admin.url, admin.data)
        for workspace, names in {"desk": ("chat", "batch"), "code": ("agent",)}.items():
            admin.workspace(workspace)
            for name in names:
                keys[workspace, name] = admin.make_key(workspace, name=name)[1]
        # Overlapping: one system prompt, and longer ones that begin with it.
        plain = marked(RULES)
        for workspace, name in (("desk", "chat"), ("code", "agent")):
            traffic.turn(workspace, name, keys[workspace, name], plain, "Why?")
        for number in range(3):
            longer = [*plain, *marked(f"{number}. " + "The sea is calm. " * (20 + number))]
            traffic.turn("desk", "batch", keys["desk", "batch"], longer, "And now?")
        count = "SELECT COUNT(*) FROM turns"
        eventually(lambda: rows(traffic.data, count)[0][0] == 5)
        yield traffic


def test_memory_is_told_by_workspace_and_key_each_block_once(traffic: Sent, show: Show) -> None:
    app = show(traffic.gateway, "memory", ADMIN_KEY)
    whole = table(app, "Workspace").set_index("Workspace")
    assert whole["Share"].sum() == pytest.approx(1, abs=5.1e-4 * len(whole)), "no more, no less"
    assert whole["Blocks"].sum() == NUM_BLOCKS
    frame = whole.drop("Free")
    outside = Counter[str]()
    for (workspace, _), blocks in traffic.blocks.items():
        outside[workspace] += blocks
    in_sql = Counter[str]()
    for workspace, read_tokens, written_tokens in rows(
        traffic.data,
        """SELECT workspace_id, cache_read_tokens,
           cache_write_5m_tokens + cache_write_1h_tokens FROM turns""",
    ):
        in_sql[workspace] += added(read_tokens, written_tokens)
    assert dict(frame["Leased"]) == dict(outside) == dict(in_sql)
    # What was not marked is kept without an entry, and told by workspace alone.
    (pool,) = Admin(traffic.gateway).get("engines/memory")
    blocks = pool["stats"]["blocks"]
    assert frame["Leased"].sum() == blocks["leased"] and blocks["best_effort"] == 0
    assert frame["Without an entry"].sum() == blocks["cached"]
    assert frame["Blocks"].sum() == NUM_BLOCKS - blocks["free"]
    leased = outside.total() / NUM_BLOCKS
    assert card(app, "Leased")[0] == f"{leased:.1%}" and f"**{leased:.1%}** is promised" in said(
        app
    )
    assert card(app, "Free")[0] == f"{blocks['free'] / NUM_BLOCKS:.1%}"
    # Blocks are drawn as counts, and none of them as a share.
    (drawn,) = (element for element in app.dataframe if "Best effort" in element.value.columns)
    columns = json.loads(drawn.proto.columns)
    kinds = {name: column.get("type_config", {}).get("type") for name, column in columns.items()}
    assert kinds["Share"] == "progress"
    assert {kinds[name] for name in ("Leased", "Best effort", "Without an entry")} == {"number"}
    # By key: the one that wrote; and what has no prefix has none.
    app.segmented_control(key="memory_by").set_value("Key").run()
    by_key = table(app, "Key")
    named = by_key[by_key["Key"].notna()]
    assert {
        (row["Workspace"], row["Key"]): row["Leased"] for row in named.to_dict("records")
    } == dict(traffic.blocks)
    unnamed = by_key[by_key["Key"].isna() & (by_key["Workspace"] != "Free")]
    assert unnamed["Leased"].sum() == 0
