"""Values that the admin API must refuse by name: none is an error of ours, none does harm later."""

import json
from typing import Any

import pytest

from gateway.admin.advice import AdviseRequest
from gateway.admin.controller import decode_body
from gateway.base.errors import InvalidRequest, TooLarge
from gateway.planning.traffic import PlanRequest
from tests.gateway.conftest import Stack
from tests.gateway.serving import ADMIN_KEY

URLS = [
    *("http://[::1", "http://x:99999", "http://x:0", "http://" + "a" * 64, "http://" + "a" * 2000),
    *("http://x/\r\nHost: y", "http://x/a b", "http://x\x00", "http://user:password@x"),
    *("http://x/?a=b", "http://x/#a", "http://", "http:///path", "//x", "file:///etc/passwd"),
    "engine:8100",
]
NAMES = [
    *("", "a\n", "a\nb", "a\x00b", "a\x85b", "a\u202eb", "a\u2066b", "\u200b", "a\u2028b"),
    "a" * 129,
]


def test_an_engines_url_is_refused_before_anybody_calls_it(stack: Stack) -> None:
    """A line break in it was a header of ours; a long label ended the engine's loop again and
    again."""
    with stack.http(ADMIN_KEY) as http:
        before = http.get("/admin/v1/engines").json()
        for url in URLS:
            answer = http.post("/admin/v1/engines", json={"url": url})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["message"].startswith("url: must be http")
        assert len(http.get("/admin/v1/engines").json()) == len(before)


def test_an_engine_is_added_once_and_what_is_no_engine_is_refused(stack: Stack) -> None:
    with stack.http(ADMIN_KEY) as http:
        (before,) = http.get("/admin/v1/engines").json()
        again = before["url"].replace("127.0.0.1", "localhost")
        for url, message in ((again, "this engine is there already"), (stack.url, "not taken for")):
            answer = http.post("/admin/v1/engines", json={"url": url})
            assert answer.status_code == 400 and message in answer.text
        assert len(http.get("/admin/v1/engines").json()) == 1


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
        body = {"workspace": "default", "expires_at": moment}
        answer = http.post("/admin/v1/keys", json=body)
    assert answer.status_code == status, answer.text
    assert status == 200 or answer.json()["error"]["message"].startswith("expires_at: must be ")


def test_names_that_would_break_a_table_are_refused_and_those_of_people_everywhere_taken(
    stack: Stack,
) -> None:
    with stack.http(ADMIN_KEY) as http:
        for name in NAMES:
            for path, field, fields in [
                ("keys", "name", {"workspace": "default"}),
                ("workspaces", "display_name", {"id": "new-name"}),
                ("workspaces", "id", {}),
                ("workspaces/default", "display_name", {}),
            ]:
                answer = http.post(f"/admin/v1/{path}", json={field: name, **fields})
                assert answer.status_code == 400, answer.text
                message = answer.json()["error"]["message"]
                assert message.startswith(f"{field}: ") and "regex" not in message
        name = "Zoë 数据 👩\u200d🔬 می\u200cخواهم"
        reply = http.post("/admin/v1/keys", json={"workspace": "default", "name": name})
        assert reply.status_code == 200, reply.text
        assert name in [key["name"] for key in http.get("/admin/v1/keys").json()]


@pytest.mark.parametrize("value", [[[]] * 500_000, {f"k{n}": n for n in range(20_000)}])
def test_a_body_of_very_many_values_is_refused_before_it_is_read(value: Any) -> None:
    with pytest.raises(TooLarge):
        decode_body(json.dumps({"requests": value}).encode(), AdviseRequest)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({f"field{n}": 1 for n in range(5000)}, id="unknown fields"),
        pytest.param({"dialect": "x" * 1_000_000, "model": "y" * 1_000_000}, id="long values"),
        pytest.param({"x" * 1_000_000: 1}, id="a long name"),
    ],
)
def test_what_is_said_of_a_wrong_body_is_short(body: dict[str, Any]) -> None:
    for kind in (AdviseRequest, PlanRequest):
        with pytest.raises(InvalidRequest) as refused:
            decode_body(json.dumps(body).encode(), kind)
        assert 0 < len(str(refused.value)) < 4000


MESSAGES = {"messages": [{"role": "user", "content": "a"}]}
ODD = [
    "curl http://[ -d '{}'",
    "curl 'http://[::1' -d '" + json.dumps(MESSAGES) + "'",
    {"messages": [{"role": ["user"], "content": "a"}]},
    {"messages": [{"role": {}, "content": "a"}], "tools": 5},
    {"messages": 5, "tools": [{"type": []}]},
    {"contents": [{"parts": [{"text": "\ud800"}]}]},
    '{"messages": [{"role": "user", "content": "\\ud800"}]}',
    '{"messages": ' + "[" * 100_000 + "]" * 100_000 + "}",
    '{"messages": ' + "1" * 100_000 + "}",
    '{"messages": NaN, "temperature": 1e400}',
    {**MESSAGES, "model": 10**30, "metadata": {"user_id": 10**40}},
]


def test_an_odd_request_for_advice_or_a_plan_is_read_or_refused_in_few_words(stack: Stack) -> None:
    headers = {"content-type": "application/json"}
    with stack.http() as http:
        for request in ODD:
            content = json.dumps({"requests": [request]}).encode()
            reply = http.post("/admin/v1/advise", content=content, headers=headers)
            assert reply.status_code in (200, 400), reply.text
            assert reply.status_code == 200 or len(reply.text) < 2000
        content = b'{"device_tokens": 1%s}' % (b"0" * 40)
        reply = http.post("/admin/v1/plan", content=content, headers=headers)
        assert reply.status_code == 400 and "device_tokens" in reply.text
