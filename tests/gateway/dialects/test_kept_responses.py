"""Responses and conversations that the gateway keeps, through the official SDK."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from engine.protocol import Finished, GenerateRequest, TextPart
from tests.gateway.admin_client import Admin
from tests.gateway.conftest import Stack, stacked
from tests.gateway.openai_bodies import LONG_TEXT, MODEL, frames
from tests.gateway.responses_bodies import user
from tests.gateway.serving import ADMIN_KEY, eventually


def test_no_response_is_kept(stack: Stack) -> None:
    client = stack.openai()
    answer = client.responses.create(model=MODEL, input="Hi", store=True)
    assert answer.model_extra is not None
    assert answer.model_extra["store"] is False
    assert answer.model_extra["holdfast"]["ignored"][0]["path"] == "store"
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match="nothing is kept"):
            call(answer.id)
    with pytest.raises(openai.BadRequestError, match="HOLDFAST_RESPONSE_DAYS") as caught:
        client.responses.create(model=MODEL, input="Hi", previous_response_id=answer.id)
    assert caught.value.code == "previous_response_not_found"
    # As the AI SDK names its own answer, whatever `store` the response had.
    named: Any = {"type": "item_reference", "id": answer.output[0].id}
    with pytest.raises(openai.BadRequestError, match=r"RESPONSE_DAYS.*Send the item") as caught:
        client.responses.create(model=MODEL, input=[user("Hi"), named, user("And then?")])
    assert caught.value.param == "input[1]"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with stacked(tmp_path_factory.mktemp("keeping"), response_days=30) as stack:
        yield stack


def texts_of(request: GenerateRequest) -> list[tuple[str, str]]:
    return [
        (message.role, part.text)
        for message in request.prompt.messages
        for part in message.parts
        if isinstance(part, TextPart)
    ]


SPOKEN = [("user", "Hi"), ("assistant", "Hello there"), ("user", "And then?")]


def test_a_response_that_is_kept_is_gone_on_with(keeping: Stack) -> None:
    client = keeping.openai()
    first = client.responses.create(model=MODEL, input="Hi", instructions="Be brief.")
    assert first.model_extra is not None and first.model_extra["store"] is True
    with client.responses.stream(
        model=MODEL, input=[user("And then?")], previous_response_id=first.id
    ) as stream:
        second = stream.get_final_response()
    assert second.previous_response_id == first.id
    request = keeping.engine.requests[-1]
    assert texts_of(request) == SPOKEN and not request.prompt.system, (
        "instructions are not carried on"
    )
    # What the first wrote, the second can find: all names of its prompt are the second's too.
    before = keeping.engine.requests[-2]
    assert before.prompt.messages == request.prompt.messages[:1]
    third = client.responses.create(model=MODEL, input="x", previous_response_id=second.id)
    assert texts_of(keeping.engine.requests[-1])[:3] == SPOKEN
    assert len(texts_of(keeping.engine.requests[-1])) == 5
    client.responses.delete(first.id)
    client.responses.create(model=MODEL, input="y", previous_response_id=third.id)
    assert SPOKEN[0] not in texts_of(keeping.engine.requests[-1]), "what is deleted is gone"
    with pytest.raises(openai.BadRequestError, match="it was deleted, its time is over") as caught:
        client.responses.create(model=MODEL, input="y", previous_response_id=first.id)
    assert caught.value.code == "previous_response_not_found"


def test_a_kept_response_is_compacted_with_all_before_it(keeping: Stack) -> None:
    client = keeping.openai()
    first = client.responses.create(model=MODEL, input="One?")
    second = client.responses.create(model=MODEL, input="Two?", previous_response_id=first.id)
    compacted = client.responses.compact(model=MODEL, previous_response_id=second.id)
    users = [item.content[0].text for item in compacted.output[:-1]]  # type: ignore[union-attr]
    assert users == ["One?", "Two?"] and compacted.output[-1].type == "compaction"
    assert len(texts_of(keeping.engine.requests[-1])) == 5


def test_a_kept_response_is_shown_with_its_input_and_deleted(keeping: Stack) -> None:
    client = keeping.openai()
    turns: Any = [user("a", "b"), {"role": "assistant", "content": "c"}, user("d")]
    response = client.responses.create(model=MODEL, input=turns, metadata={"k": "v"})
    again = client.responses.retrieve(response.id)
    assert again.to_dict() == response.to_dict()
    listed = client.responses.input_items.list(response.id, order="asc", limit=2)
    items = list(listed)
    assert [item.type for item in items] == ["message"] * 3
    assert len({item.id for item in items}) == 3
    newest = client.responses.input_items.list(response.id, limit=1)
    assert [item.id for item in newest.data] == [items[-1].id] and newest.has_more
    assert list(client.responses.input_items.list(response.id, after=items[0].id)) == []
    client.responses.delete(response.id)
    for call in (client.responses.retrieve, client.responses.delete):
        with pytest.raises(openai.NotFoundError):
            call(response.id)
    unkept = client.responses.create(model=MODEL, input="Hi", store=False)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)


def test_a_conversation_grows_with_its_responses(keeping: Stack) -> None:
    client = keeping.openai()
    message: Any = {"type": "message", "role": "user", "content": "Hi"}
    talk = client.conversations.create(items=[message], metadata={"topic": "x"})
    client.responses.create(model=MODEL, input="One", conversation=talk.id)
    answer = client.responses.create(model=MODEL, input="Two", conversation={"id": talk.id})
    assert answer.conversation is not None and answer.conversation.id == talk.id
    words = ["Hi", "One", "Hello there", "Two"]
    assert [text for _, text in texts_of(keeping.engine.requests[-1])] == words
    items = client.conversations.items.list(talk.id, order="asc")
    assert len(list(items)) == 5
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "x"}
    assert client.conversations.delete(talk.id).deleted
    with pytest.raises(openai.BadRequestError, match="not found"):
        client.responses.create(model=MODEL, input="Three", conversation=talk.id)
    assert client.responses.retrieve(answer.id).id == answer.id


def test_a_conversations_items_are_added_and_deleted_and_its_metadata_changed(
    keeping: Stack,
) -> None:
    client = keeping.openai()
    talk = client.conversations.create(metadata={"topic": "x"})
    messages: Any = [
        {"type": "message", "role": "user", "content": word} for word in ("One", "Two")
    ]
    added = client.conversations.items.create(talk.id, items=messages)
    assert added.object == "list" and len(added.data) == 2 and not added.has_more
    first, second = (item.id or "" for item in added.data)
    assert [item.to_dict()["status"] for item in added.data] == ["completed"] * 2
    assert client.conversations.items.retrieve(first, conversation_id=talk.id) == added.data[0]
    answer = client.responses.create(model=MODEL, input="Three", conversation=talk.id)
    client.conversations.items.create(talk.id, items=[{"role": "user", "content": "Four"}])
    conversation = client.conversations.items.delete(first, conversation_id=talk.id)
    assert (conversation.id, conversation.metadata) == (talk.id, {"topic": "x"})
    client.conversations.items.delete(answer.output[0].id or "", conversation_id=talk.id)
    client.responses.create(model=MODEL, input="Five", conversation=talk.id)
    texts = [text for _, text in texts_of(keeping.engine.requests[-1])]
    assert texts == ["Two", "Three", "Four", "Five"]
    for call in (client.conversations.items.retrieve, client.conversations.items.delete):
        with pytest.raises(openai.NotFoundError, match=first):
            call(first, conversation_id=talk.id)
    assert client.conversations.update(talk.id, metadata={"topic": "y"}).metadata == {"topic": "y"}
    assert client.conversations.retrieve(talk.id).metadata == {"topic": "y"}
    client.conversations.delete(talk.id)
    with pytest.raises(openai.NotFoundError):
        client.conversations.items.create(talk.id, items=messages)
    assert client.responses.retrieve(answer.id).output_text == "Hello there"
    assert second not in str(client.responses.retrieve(answer.id).to_dict())


def test_what_no_conversation_can_be_given_is_named(keeping: Stack) -> None:
    client = keeping.openai()
    talk = client.conversations.create().id
    refer: Any = {"type": "item_reference", "id": "msg_1"}
    wrong: list[tuple[Any, str]] = [
        (lambda: client.conversations.items.create(talk, items=[]), "items"),
        (lambda: client.conversations.items.create(talk, items=[refer]), r"items\[0\]"),
        (lambda: client.conversations.create(items=[refer]), r"items\[0\]"),
        (
            lambda: client.post(f"/conversations/{talk}", body={"items": []}, cast_to=object),
            "items",
        ),
    ]
    for call, words in wrong:
        with pytest.raises(openai.BadRequestError, match=words):
            call()


def test_a_workspace_that_has_kept_all_it_may_is_told_its_bound_and_nothing_is_dropped(
    tmp_path: Path,
) -> None:
    with stacked(tmp_path, response_days=30, response_bytes=2000) as stack:
        client = stack.openai()
        response_ids: list[str] = []
        with pytest.raises(openai.RateLimitError, match="limit of 2000 bytes of kept responses"):
            for _ in range(50):
                response_ids.append(client.responses.create(model=MODEL, input="Hi").id)
        with pytest.raises(openai.RateLimitError, match="2000 bytes"):
            client.conversations.create()
        assert client.responses.create(model=MODEL, input="Hi", store=False).output_text
        for response_id in response_ids:
            client.responses.retrieve(response_id)
            client.responses.delete(response_id)

        def has_room() -> bool:
            try:
                return bool(client.responses.create(model=MODEL, input="Hi").id)
            except openai.RateLimitError:
                return False

        eventually(has_room)


def test_an_item_of_a_kept_response_is_named_by_its_id(keeping: Stack) -> None:
    client = keeping.openai()
    first = client.responses.create(model=MODEL, input="Hi")
    named = {"type": "item_reference", "id": first.output[0].id}
    again: Any = [user("Hi"), named, user("And then?")]
    client.responses.create(model=MODEL, input=again)
    assert texts_of(keeping.engine.requests[-1]) == SPOKEN
    again[1] = {"id": "msg_0000"}
    with pytest.raises(openai.BadRequestError, match="its time is over") as caught:
        client.responses.create(model=MODEL, input=again)
    assert caught.value.param == "input[1]"


def test_no_other_workspace_sees_what_is_kept(keeping: Stack) -> None:
    response = keeping.openai().responses.create(model=MODEL, input="Hi")
    talk = keeping.openai().conversations.create()
    admin = Admin(keeping.url, ADMIN_KEY)
    admin.workspace("other")
    key = admin.make_key("other")[1]
    stranger = openai.OpenAI(base_url=f"{keeping.url}/v1", api_key=key, max_retries=0)
    with pytest.raises(openai.NotFoundError):
        stranger.responses.retrieve(response.id)
    with pytest.raises(openai.NotFoundError):
        stranger.responses.delete(response.id)
    for named in ({"previous_response_id": response.id}, {"conversation": talk.id}):
        with pytest.raises(openai.BadRequestError, match="not found"):
            stranger.responses.create(model=MODEL, input="x", **named)
    assert keeping.openai().responses.retrieve(response.id).id == response.id


@pytest.mark.parametrize("how", [{"generate": False}, {"prompt_cache_options": {"prewarm": True}}])
def test_a_prewarmed_response_that_is_kept_is_gone_on_with(
    keeping: Stack, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    client = keeping.openai()
    script = frames(Finished(reason="length", output_tokens=0))
    monkeypatch.setattr(keeping.engine, "script", script)
    ready = client.responses.create(
        model=MODEL,
        input=[user(LONG_TEXT)],
        store=True,
        extra_body=how,  # type: ignore[arg-type]
    )
    assert (ready.output, ready.model_extra and ready.model_extra["store"]) == ([], True)
    before = keeping.engine.requests[-1].prompt
    client.responses.create(model=MODEL, input="And now?", previous_response_id=ready.id)
    after = keeping.engine.requests[-1].prompt
    assert after.messages[0].parts[:1] == before.messages[0].parts
    unkept = client.responses.create(
        model=MODEL,
        input=[user(LONG_TEXT)],
        extra_body=how,  # type: ignore[arg-type]
    )
    with pytest.raises(openai.BadRequestError):
        client.responses.create(model=MODEL, input="x", previous_response_id=unkept.id)
