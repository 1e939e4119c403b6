"""One model has one name, in the ledger, on every page's source and in the metrics."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.gateway.admin_client import Admin
from tests.gateway.scripted_engine import ScriptedEngine
from tests.gateway.serving import ask, eventually, serve, serve_gateway

PATH = "/models/acme/Tiny-1B"
TABLE = f"""default = "any"
[[models]]
id = "any"
[[models]]
id = "tiny"
engine_model = "{PATH}"
"""


@pytest.mark.parametrize(("table", "name"), [(None, "Tiny-1B"), (TABLE, "tiny")])
def test_an_alias_a_path_and_the_table_s_id_are_one_model(
    tmp_path: Path, table: str | None, name: str
) -> None:
    """An answer repeats the id that was asked for; all that is counted goes by the one name."""
    changes = {}
    if table is not None:
        changes["models"] = tmp_path / "models.toml"
        changes["models"].write_text(table, "utf-8")
    names = ["any" if table else "holdfast-demo", "claude-opus-4-1", PATH, "Tiny-1B", name]
    with (
        serve(ScriptedEngine(model=PATH)) as engine,
        serve_gateway(tmp_path, engine, claude_alias=True, **changes) as url,
    ):
        for alias in names:
            assert ask(url, model=alias).raise_for_status().json()["model"] == alias
        admin = Admin(url)
        eventually(lambda: len(admin.get("turns/search?since_ms=0")["turns"]) == len(names))
        rows = admin.get("turns/search?since_ms=0")["turns"]
        assert {row["model"] for row in rows} == {name}
        about = admin.get("about")
        assert about["models"] == about["served"] == [name]
        (described,) = admin.get("engines")
        (memory,) = admin.get("engines/memory")
        assert described["description"]["model"] == memory["model"] == name
        ready = httpx.get(f"{url}/readyz", timeout=60).json()
        assert [engine["model"] for engine in ready["engines"]] == [name]
        text = httpx.get(f"{url}/metrics", timeout=60).text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        assert {s.labels["model"] for s in samples if "model" in s.labels} == {name}
