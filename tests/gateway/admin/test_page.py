"""The page's table of the admin API names every call that is served."""

import re
from pathlib import Path

from tests.gateway.operations import OPERATIONS

README = Path(__file__).parents[3] / "gateway" / "README.md"
ID = re.compile(r"\{\w+\}|\bID\b")


def test_every_call_of_the_admin_api_is_named() -> None:
    section = README.read_text("utf-8").partition("\n## Admin API\n")[2].partition("\n## ")[0]
    named, parent = set[str](), ""
    for row in section.splitlines():
        for path in re.findall(r"/[\w/.{}]+", ID.sub("{}", row.partition(" | ")[0])):
            # `/restore` behind `/workspaces/{id}/archive` stands for a path of the same parent.
            is_whole = path.startswith(("/admin", "/v1"))
            named.add(path if is_whole else parent + path)
            parent = path.rpartition("/")[0] if is_whole else parent
    served = {ID.sub("{}", one.path) for one in OPERATIONS if one.path.startswith("/admin")}
    assert served <= named, sorted(served - named)
