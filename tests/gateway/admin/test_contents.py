"""A workspace that says so keeps its prompts and answers, and nobody else sees them."""

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI

from scripts.stack import ADMIN_KEY, API_KEY, running_stack
from tests.gateway.admin_client import Admin
from tests.gateway.serving import eventually

SECRET = "The patient is called Rosalind Quill."


class Site:
    def __init__(self, gateway: str, data: Path) -> None:
        self.gateway = gateway
        self.data = data
        self.admin = Admin(gateway, ADMIN_KEY)

    def ask(self, key: str, *, stream: bool = False) -> tuple[str, str]:
        """The id and the text of an answer."""
        with Anthropic(base_url=self.gateway, api_key=key, max_retries=0, timeout=120) as client:
            options = {"model": "synthetic", "max_tokens": 6, "system": SECRET}
            messages = [{"role": "user", "content": "Who?"}]
            if stream:
                with client.messages.stream(messages=messages, **options) as events:  # type: ignore[arg-type]
                    message = events.get_final_message()
            else:
                message = client.messages.create(messages=messages, **options)  # type: ignore[call-overload]
        eventually(lambda: message.id in self.ids())
        return message.id, message.content[0].text  # type: ignore[union-attr]

    def ids(self) -> list[str]:
        return [turn["id"] for turn in self.admin.get("turns/search?limit=1000")["turns"]]

    def kept_of(self, turn_id: str) -> dict[str, Any] | None:
        reply = httpx.get(
            f"{self.gateway}/admin/v1/turns/{turn_id}/content",
            headers={"x-api-key": ADMIN_KEY},
            timeout=120,
        )
        content: dict[str, Any] = reply.json()
        return content if reply.status_code == 200 else None

    def kept(self) -> list[bytes]:
        with closing(sqlite3.connect(self.data / "ledger.db")) as connection:
            return [body for (body,) in connection.execute("SELECT body FROM turn_contents")]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    data = tmp_path_factory.mktemp("contents")
    with running_stack(data, "synthetic") as stack:
        yield Site(stack.gateway, data)


def test_nothing_is_kept_before_a_workspace_says_so(site: Site) -> None:
    before = site.kept()
    turn_id, _ = site.ask(API_KEY)
    assert site.admin.get("workspaces/default")["workspace"]["keep_days"] is None
    site.admin.get(f"turns/{turn_id}/content", status=404)
    assert set(site.kept()) <= set(before)


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_kept_is_what_was_sent_and_answered(site: Site, stream: bool) -> None:
    name = f"keeps-{stream}".lower()
    site.admin.workspace(name, keep_days=7)
    key = site.admin.make_key(name)[1]
    turn_id, text = site.ask(key, stream=stream)
    eventually(lambda: site.kept_of(turn_id) is not None)
    content = site.admin.get(f"turns/{turn_id}/content")
    assert Admin(site.gateway, key).get(f"turns/{turn_id}/content") == content
    assert content["prompt"]["system"][0]["text"] == SECRET
    assert [(part["kind"], part["text"]) for part in content["answer"]] == [("text", text)]
    days = (content["until_ms"] - site.admin.get(f"turns/{turn_id}")["opened_ms"]) / 86_400_000
    assert days == 7
    assert all(SECRET.encode() not in body for body in site.kept()), "it is encrypted"
    # Nobody else sees it.
    site.admin.workspace(f"other-{name}")
    stranger = Admin(site.gateway, site.admin.make_key(f"other-{name}")[1])
    stranger.get(f"turns/{turn_id}/content", status=404)
    reader = Admin(site.gateway, site.admin.make_key("default", scope="read_only_admin")[1])
    reader.get(f"turns/{turn_id}/content", status=403)
    Admin(site.gateway, key).delete(f"turns/{turn_id}/content", status=403)


def test_other_dialects_and_several_answers_are_kept_alike(site: Site) -> None:
    site.admin.workspace("chat", keep_days=1)
    key = site.admin.make_key("chat")[1]
    client = OpenAI(base_url=f"{site.gateway}/v1", api_key=key, max_retries=0, timeout=120)
    with client:
        answer = client.chat.completions.create(
            model="synthetic", max_tokens=3, n=2, messages=[{"role": "user", "content": SECRET}]
        )
    eventually(lambda: site.kept_of(answer.id) is not None)
    content = site.kept_of(answer.id)
    assert content is not None
    texts = {part["choice"]: part["text"] for part in content["answer"]}
    assert texts == {choice.index: choice.message.content for choice in answer.choices}


def test_it_is_gone_when_it_is_deleted_and_when_the_workspace_keeps_no_more(site: Site) -> None:
    site.admin.workspace("gone", keep_days=1)
    key = site.admin.make_key("gone")[1]
    before = len(site.kept())
    (first, _) = site.ask(key)
    (second, _) = site.ask(key)
    eventually(lambda: len(site.kept()) == before + 2)
    site.admin.delete(f"turns/{first}/content")
    site.admin.get(f"turns/{first}/content", status=404)
    assert len(site.kept()) == before + 1
    site.admin.post("workspaces/gone", {"keep_days": None})
    site.admin.get(f"turns/{second}/content", status=404)
    assert len(site.kept()) == before, "at once, not by and by"
    assert site.admin.get(f"turns/{second}")["output_tokens"] == 6, "the counts stay"
    eventually(lambda: site.admin.get("workspaces/gone")["workspace"]["keep_days"] is None)
    third, _ = site.ask(key)
    site.admin.get(f"turns/{third}/content", status=404)
