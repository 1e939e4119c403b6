"""A request id leads to its turn or its error, and a miss to the earlier prompt to compare with."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic, BadRequestError
from anthropic.types import Message

from scripts.stack import ADMIN_KEY, API_KEY, Stack, running_stack
from tests.gateway import serving
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually, serve_gateway

BOOK = "A lease holds blocks until it ends. " * 60


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running_stack(tmp_path_factory.mktemp("origin"), "synthetic") as running:
        yield running


@pytest.fixture
def admin(stack: Stack) -> Admin:
    return Admin(stack.gateway, ADMIN_KEY)


def ask(stack: Stack, key: str, *system: str) -> Message:
    """Send a prompt of these system blocks, and wait until the ledger has its turn."""
    with Anthropic(base_url=stack.gateway, api_key=key, max_retries=0, timeout=120) as client:
        answer = client.messages.create(
            model="synthetic",
            max_tokens=2,
            system=[{"type": "text", "text": text} for text in system],
            messages=[{"role": "user", "content": "Hi"}],
            extra_body={"metadata": {"name": "support handbook"}},
        )
    url = f"{stack.gateway}/admin/v1/turns/{answer.id}"
    headers = {"x-api-key": ADMIN_KEY}
    eventually(lambda: httpx.get(url, headers=headers, timeout=60).status_code == 200)
    return answer


def test_a_request_id_of_anthropics_sdk_leads_to_its_turn(stack: Stack, admin: Admin) -> None:
    answer = ask(stack, API_KEY)
    assert answer._request_id is not None
    turn = admin.get(f"turns/{answer._request_id}")
    assert (turn["id"], turn["http_request_id"]) == (answer.id, answer._request_id)
    assert (turn["status"], turn["error"]) == (200, None)
    assert turn["name"] == "support handbook"
    assert str(turn["user_agent"]).startswith("Anthropic/Python")
    for prefix in ("chatcmpl-", "cmpl-", "resp_"):
        assert admin.get(f"turns/{prefix}{answer.id.removeprefix('msg_')}") == turn


def test_the_answer_that_no_model_is_served_is_found_by_its_request_id(tmp_path: Path) -> None:
    with serve_gateway(tmp_path, "http://127.0.0.1:9") as gateway:
        for path in ("/v1/messages", "/v1/chat/completions"):
            reply = serving.ask(gateway, path, model="m")
            request_id = reply.headers.get("request-id") or reply.headers["x-request-id"]
            (refusal,) = Admin(gateway).get(f"refusals?request_id={request_id}")
            assert reply.status_code == refusal["status"] == 404
            assert refusal["message"] == reply.json()["error"]["message"]


def test_what_was_refused_at_the_door_is_found_by_its_own_workspace(
    stack: Stack, admin: Admin
) -> None:
    with (
        Anthropic(base_url=stack.gateway, api_key=API_KEY, max_retries=0, timeout=120) as client,
        pytest.raises(BadRequestError) as refused,
    ):
        client.messages.create(model="synthetic", max_tokens=2, messages=[])
    (refusal,) = admin.get(f"refusals?request_id={refused.value.request_id}")
    assert refusal["status"] == 400 and refusal["workspace"] == "default"
    assert "messages" in refusal["message"] and refusal["path"] == "/v1/messages"
    admin.workspace("other")
    key = admin.make_key("other")[1]
    for headers in ({}, {"x-api-key": key}):
        httpx.post(f"{stack.gateway}/v1/messages", headers=headers, content=b"{", timeout=60)
    refusals = Admin(stack.gateway, key).get("refusals")
    assert {refusal["workspace"] for refusal in refusals} == {"other"}
    assert {None, "other"} <= {refusal["workspace"] for refusal in admin.get("refusals")}


def test_a_conversations_turns_stand_in_a_row(stack: Stack, admin: Admin) -> None:
    admin.workspace("talk")
    key = admin.make_key("talk")[1]
    talk: list[dict[str, str]] = []
    ids = []
    with Anthropic(base_url=stack.gateway, api_key=key, max_retries=0, timeout=120) as client:
        for number in range(4):
            talk.append({"role": "user", "content": f"{BOOK} And question {number}?"})
            for _ in range(1 + (number == 1)):  # the second is sent again
                message = client.messages.create(
                    model="synthetic",
                    max_tokens=2,
                    messages=talk,  # type: ignore[arg-type]
                    cache_control={"type": "ephemeral"},
                )
                ids.append(message.id)
            talk.append({"role": "assistant", "content": f"answer {number}"})
            # Another one that begins alike, between the turns.
            other_book = [{"role": "user", "content": f"{BOOK} And question {number + 9}?"}]
            client.messages.create(model="synthetic", max_tokens=2, messages=other_book)  # type: ignore[arg-type]
    eventually(lambda: len(admin.get("turns/search?workspace=talk")["turns"]) == 9)
    for turn_id in ids:
        conversation = admin.get(f"turns/{turn_id}/conversation")
        assert [turn["id"] for turn in conversation] == ids
    reads = [turn["cache_read_tokens"] for turn in conversation]
    assert reads[0] == 0 < reads[-1] and sorted(reads) == reads, "each reads the one before"
    theirs = Admin(stack.gateway, admin.make_key("default")[1])
    theirs.get(f"turns/{ids[0]}/conversation", status=404)


def test_memory_and_queue_have_a_history(stack: Stack, admin: Admin) -> None:
    def samples() -> list[Any]:
        """A minute that has just begun has nothing yet."""
        return [sample for sample in admin.get("engines/load") if sample["in_use"] is not None]

    eventually(samples)
    last = samples()[-1]
    assert 0 <= last["leased"] <= last["in_use"] <= 1
    assert last["start_ms"] % 60_000 == 0 and last["queued"] >= 0
    assert admin.get("engines/load?engine=none")[-1]["in_use"] is None
    assert admin.get("engines/load?since_ms=0&until_ms=60000") == []


def test_what_a_limit_refused_is_counted_by_key(stack: Stack, admin: Admin) -> None:
    admin.workspace("slow", requests_per_minute=1)
    key_id, key = admin.make_key("slow", name="robot")
    replies = [serving.ask(stack.gateway, key=key, model="synthetic") for _ in range(3)]
    assert [reply.status_code for reply in replies] == [200, 429, 429]
    (limits,) = Admin(stack.gateway, key).get("refusals/limits")
    assert limits in admin.get("refusals/limits")
    assert (limits["workspace"], limits["key"]) == ("slow", key_id)
    assert (limits["limit"], limits["requests"]) == ("requests per minute", 2)
    (last, _) = admin.get("refusals?workspace=slow")
    assert "limit of 1 request per minute" in last["message"]
    assert (last["key"], last["limit"]) == (key_id, "requests per minute")
    assert last["at_ms"] == limits["last_ms"]


def test_a_prompt_is_compared_with_an_earlier_one_that_shares_something(
    stack: Stack, admin: Admin
) -> None:
    admin.workspace("mixed")
    key = admin.make_key("mixed")[1]

    def divergence_of(*system: str) -> dict[str, object]:
        comparison: dict[str, object] = admin.get(f"turns/{ask(stack, key, *system).id}/divergence")
        return comparison

    first = ask(stack, key, BOOK + "Today is Sunday.").id
    ask(stack, key, "Another program's prompt. " * 400, "It has two blocks.")
    for alone in (("Short and new.", "b", "c"), ("x" * round(len(BOOK) * 1.08),)):
        divergence = divergence_of(*alone)
        assert divergence["earlier"] is None and divergence["missed_nano"] is None
    again = divergence_of(BOOK + "Today is Monday.")
    assert (again["earlier"], again["kind"]) == (first, "system_changed")
    assert again["missed_nano"] is None, "how long they are alike is not known"


@pytest.mark.parametrize("days", [None, 3])
def test_a_date_in_the_middle_is_told_exactly_or_between_bounds(
    stack: Stack, admin: Admin, days: int | None
) -> None:
    """Where the workspace keeps what it is sent the place is known; else names bound it."""
    name = f"dated-{days}"
    admin.workspace(name, keep_days=days)
    _, key = admin.make_key(name)
    book = BOOK * 6
    first = ask(stack, key, f"{'x' * 99}Monday. {book}")
    second = ask(stack, key, f"{'x' * 99}Sunday. {book}")
    if days is not None:
        for turn in (first, second):
            eventually(lambda turn=turn: admin.get(f"turns/{turn.id}/content") is not None)
    divergence = admin.get(f"turns/{second.id}/divergence?from={first.id}")
    assert (divergence["kind"], divergence["section"], divergence["block"]) == (
        "system_changed",
        "system",
        0,
    )
    if days is not None:
        assert divergence["is_exact"] and divergence["characters"] == 99
        assert divergence["grid_characters"] is None
        assert 0 < divergence["shared_tokens"] < 60
        return
    assert not divergence["is_exact"]
    assert divergence["characters"] <= 99 < divergence["characters_below"] <= 4096
    assert divergence["grid_characters"] == 4096
    assert divergence["shared_tokens"] <= 99 and divergence["shared_tokens_below"] >= 25
