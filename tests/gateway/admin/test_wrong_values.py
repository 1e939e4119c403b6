"""Values that the admin API must refuse by name: none is an error of ours, none does harm later."""

import pytest

from tests.gateway.conftest import Stack
from tests.gateway.serving import ADMIN_KEY

URLS = [
    "http://[::1",
    "http://x:99999",
    "http://x:0",
    "http://" + "a" * 64,
    "http://" + "a" * 2000,
    "http://x/\r\nHost: y",
    "http://x/a b",
    "http://x\x00",
    "http://user:password@x",
    "http://x/?a=b",
    "http://x/#a",
    "http://",
    "http:///path",
    "//x",
    "file:///etc/passwd",
]


@pytest.mark.parametrize("url", URLS)
def test_an_engines_url_is_refused_before_anybody_calls_it(stack: Stack, url: str) -> None:
    """A line break in it was a header of ours; a long label ended the engine's loop again and
    again."""
    with stack.http(ADMIN_KEY) as http:
        before = http.get("/admin/v1/engines").json()
        answer = http.post("/admin/v1/engines", json={"url": url})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("url: must be http")
        assert len(http.get("/admin/v1/engines").json()) == len(before)


@pytest.mark.parametrize(
    ("moment", "status"),
    [
        ("9999-12-31T23:59:59-12:00", 400),
        ("0001-01-01T00:00:00+12:00", 400),
        ("9999-12-31T23:59:59Z", 200),
        ("9999-12-31T23:59:59+12:00", 200),
    ],
)
def test_a_keys_end_is_a_moment_that_utc_has(stack: Stack, moment: str, status: int) -> None:
    with stack.http(ADMIN_KEY) as http:
        asked = {"workspace": "default", "expires_at": moment}
        answer = http.post("/admin/v1/keys", json=asked)
    assert answer.status_code == status, answer.text
    if status == 400:
        assert answer.json()["error"]["message"].startswith("expires_at: must be ")


NAMES = [
    "",
    "a\n",
    "a\nb",
    "a\x00b",
    "a\x85b",
    "a\u202eb",
    "a\u2066b",
    "\u200b",
    "a\u2028b",
    "a" * 129,
]


@pytest.mark.parametrize("name", NAMES)
def test_names_that_would_break_a_table_are_refused(stack: Stack, name: str) -> None:
    with stack.http(ADMIN_KEY) as http:
        for path, field, others in [
            ("keys", "name", {"workspace": "default"}),
            ("workspaces", "display_name", {"id": "new-name"}),
            ("workspaces", "id", {}),
        ]:
            answer = http.post(f"/admin/v1/{path}", json={field: name, **others})
            assert answer.status_code == 400, answer.text
            message = answer.json()["error"]["message"]
            assert message.startswith(f"{field}: ") and "regex" not in message
        changed = http.post("/admin/v1/workspaces/default", json={"display_name": name})
        assert changed.status_code == 400


def test_names_of_people_everywhere_are_taken(stack: Stack) -> None:
    name = "Zoë 数据 👩\u200d🔬 می\u200cخواهم"
    with stack.http(ADMIN_KEY) as http:
        made = http.post("/admin/v1/keys", json={"workspace": "default", "name": name})
        assert made.status_code == 200, made.text
        assert name in [key["name"] for key in http.get("/admin/v1/keys").json()]
