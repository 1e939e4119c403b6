"""Large and odd bodies of the admin API, which a key of any workspace may send."""

import json
from typing import Any

import pytest

from gateway.admin.advice import AdviseRequest, PlanRequest
from gateway.admin.controller import decode_body
from gateway.advice import pasted
from gateway.base.errors import InvalidRequest, TooLarge
from tests.gateway.conftest import Stack

MESSAGES = {"messages": [{"role": "user", "content": "a"}]}


@pytest.mark.parametrize("value", [[[]] * 500_000, {f"k{n}": n for n in range(20_000)}])
def test_a_body_of_very_many_values_is_refused_before_it_is_read(value: Any) -> None:
    with pytest.raises(TooLarge):
        decode_body(json.dumps({"requests": value}).encode(), AdviseRequest)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param({f"field{n}": 1 for n in range(5000)}, id="unknown fields"),
        pytest.param({"dialect": "x" * 1_000_000, "model": "y" * 1_000_000}, id="long values"),
        pytest.param({"made": {"x" * 1_000_000: 1}}, id="a long name"),
    ],
)
def test_what_is_said_of_a_wrong_body_is_short(body: dict[str, Any]) -> None:
    for kind in (AdviseRequest, PlanRequest):
        with pytest.raises(InvalidRequest) as refused:
            decode_body(json.dumps(body).encode(), kind)
        assert 0 < len(str(refused.value)) < 4000


def test_a_plan_of_a_model_with_integers_of_any_length_is_refused(stack: Stack) -> None:
    with stack.http() as http:
        content = b'{"config": {"hidden_size": 1%s}}' % (b"0" * 40)
        headers = {"content-type": "application/json"}
        reply = http.post("/admin/v1/plan", content=content, headers=headers)
    assert reply.status_code == 400 and "config: integers" in reply.text


@pytest.mark.parametrize(
    "given",
    [
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
    ],
)
def test_an_odd_request_for_advice_is_read_or_refused(stack: Stack, given: Any) -> None:
    try:
        pasted.read(given)
    except InvalidRequest as error:
        assert 0 < len(str(error)) < 2000
    with stack.http() as http:
        content = json.dumps({"requests": [given]}).encode()
        headers = {"content-type": "application/json"}
        reply = http.post("/admin/v1/advise", content=content, headers=headers)
    assert reply.status_code in (200, 400), reply.text
