"""A request id that an SDK prints leads to its turn, or to the error it was answered with."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from anthropic import Anthropic, BadRequestError

from scripts.stack import ADMIN_KEY, API_KEY, Stack, running_stack
from tests.gateway import serving
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually, serve_gateway


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("origin"), "synthetic") as running:
        yield running


@pytest.fixture
def admin(stack: Stack) -> Admin:
    return Admin(stack.gateway, ADMIN_KEY)


def recorded(gateway: str, request_id: str) -> dict[str, object]:
    headers = {"x-api-key": ADMIN_KEY}

    def found() -> bool:
        url = f"{gateway}/admin/v1/turns/{request_id}"
        return httpx.get(url, headers=headers, timeout=60).status_code == 200

    eventually(found)
    turn: dict[str, object] = Admin(gateway, ADMIN_KEY).get(f"turns/{request_id}")
    return turn


def test_a_request_id_of_anthropics_sdk_leads_to_its_turn(stack: Stack) -> None:
    with Anthropic(base_url=stack.gateway, api_key=API_KEY, max_retries=0, timeout=120) as client:
        answer = client.messages.create(
            model="synthetic",
            max_tokens=2,
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"metadata": {"name": "support handbook"}},
        )
    assert answer._request_id is not None
    turn = recorded(stack.gateway, answer._request_id)
    assert (turn["id"], turn["http_request_id"]) == (answer.id, answer._request_id)
    assert (turn["status"], turn["error"]) == (200, None)
    assert turn["name"] == "support handbook"
    assert str(turn["user_agent"]).startswith("Anthropic/Python")


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions"])
def test_the_answer_that_no_model_is_served_is_found_by_its_request_id(
    tmp_path: Path, path: str
) -> None:
    with serve_gateway(tmp_path, "http://127.0.0.1:9") as gateway:
        body = {"model": "m", "max_tokens": 2, "messages": [{"role": "user", "content": "Hi"}]}
        headers = {"x-api-key": serving.API_KEY, "anthropic-version": "2023-06-01"}
        reply = httpx.post(f"{gateway}{path}", json=body, headers=headers, timeout=60)
        request_id = reply.headers.get("request-id") or reply.headers["x-request-id"]
        (found,) = Admin(gateway, serving.ADMIN_KEY).get(f"refusals?request_id={request_id}")
    assert reply.status_code == found["status"] == 404
    assert found["message"] == reply.json()["error"]["message"]


def test_a_request_that_was_refused_at_the_door_is_found_too(stack: Stack, admin: Admin) -> None:
    with (
        Anthropic(base_url=stack.gateway, api_key=API_KEY, max_retries=0, timeout=120) as client,
        pytest.raises(BadRequestError) as refused,
    ):
        client.messages.create(model="synthetic", max_tokens=2, messages=[])
    (found,) = admin.get(f"refusals?request_id={refused.value.request_id}")
    assert found["status"] == 400 and found["workspace"] == "default"
    assert "messages" in found["message"] and found["path"] == "/v1/messages"


def test_a_workspace_sees_its_own_refusals_alone(stack: Stack, admin: Admin) -> None:
    admin.workspace("other")
    key = admin.make_key("other")[1]
    httpx.post(f"{stack.gateway}/v1/messages", json={}, timeout=60)  # without a key
    httpx.post(f"{stack.gateway}/v1/messages", headers={"x-api-key": key}, content=b"{", timeout=60)
    own = Admin(stack.gateway, key).get("refusals")
    assert {each["workspace"] for each in own} == {"other"}
    assert {None, "other"} <= {each["workspace"] for each in admin.get("refusals")}
