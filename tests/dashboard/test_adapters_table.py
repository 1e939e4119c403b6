"""The page Fleet in a browser, before a native engine whose adapters come and go."""

import time
from pathlib import Path

import pytest

from scripts.setup.chromium import browsing, find_chromium
from scripts.stack import ADMIN_KEY, running_stack
from tests.adapters import INVOCATION, invocation_of, write_adapter
from tests.dashboard.page import WAIT_MS, Visit, running_dashboard
from tests.fuzz.tiny_model import write_tiny_model
from tests.gateway.admin_client import Admin

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(find_chromium() is None, reason="no Chromium"),
]


def test_adapters_that_are_loaded_and_unloaded_come_and_go_in_the_table(tmp_path: Path) -> None:
    model, folder = write_tiny_model(tmp_path / "tiny"), tmp_path / "adapters"
    write_adapter(model, folder / "blue", 1)
    settings = {"ENGINE_MODEL": str(model), "ENGINE_ADAPTERS": str(folder)}
    with (
        running_stack(tmp_path / "data", "native", settings) as stack,
        running_dashboard(stack.gateway, tmp_path) as url,
        browsing() as opened,
    ):
        admin, visit = Admin(stack.gateway, ADMIN_KEY), Visit(opened, url, ADMIN_KEY)
        [engine] = admin.get("engines")
        adapters = f"engines/{engine['name']}/adapters"
        page = visit.open("/fleet")
        # A grid is painted; its cells stand behind it as text for those who can't see them.
        grid = page.get_by_test_id("stDataFrame").filter(has_text="Acts from")

        def rows() -> dict[str, str]:
            """What stands behind each adapter's name."""
            cells = "".join(grid.all_text_contents()).split("tiny:")[1:]
            return {row.partition("loaded")[0]: row for row in cells}

        def wait_for(*names: str) -> None:
            deadline = time.monotonic() + WAIT_MS / 1000
            while set(rows()) != set(names):
                assert time.monotonic() < deadline, f"{rows()} are no rows of {names}"
                page.wait_for_timeout(200)

        wait_for("blue")
        write_adapter(model, folder / "judge", 2, alora_invocation_tokens=invocation_of(model))
        described = admin.post(adapters, {"name": "judge"})["description"]["adapters"]
        digests = {one["name"]: one["digest"][:12] for one in described}
        wait_for("blue", "judge")
        assert all(digests[name] in row and engine["name"] in row for name, row in rows().items())
        assert repr(INVOCATION) in rows()["judge"] and "the start" in rows()["blue"]
        admin.delete(f"{adapters}/judge")
        wait_for("blue")
        write_adapter(model, folder / "blue", 3)  # trained anew
        admin.post(adapters, {"name": "blue"})
        grid.filter(has_text=digests["blue"]).wait_for(state="detached", timeout=WAIT_MS)
        wait_for("blue")
        admin.delete(f"{adapters}/blue")
        grid.wait_for(state="detached", timeout=WAIT_MS)
        visit.context.close()
        visit.check()
