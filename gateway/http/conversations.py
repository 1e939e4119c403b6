"""The calls of OpenAI's Conversations API: chains of stored responses and items."""

import secrets

from litestar import Controller, delete, get, post
from litestar.params import FromPath, RawBody
from litestar.response.base import ASGIResponse
from msgspec import Raw

from gateway.base.errors import InvalidRequest, NotFound
from gateway.dialects.responses import response as responses
from gateway.dialects.responses.request import (
    ConversationRequest,
    decode_conversation,
    items_of,
)
from gateway.dialects.responses.typed import id_of
from gateway.http.auth import KeyAuth
from gateway.http.generation import KeyRequest, answered
from gateway.http.query import check_query
from gateway.http.services import services_of
from gateway.http.stored_responses import chain_of, items_in, stored_of
from gateway.turn.contents import Link, StoredResponse, check_chain


class ConversationsController(Controller):
    """/v1/conversations: chains of responses that have an id of their own."""

    path = "/v1/conversations"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        services = services_of(request)
        workspace = request.user.workspace
        if not services.responses.keeps(request.user):
            raise InvalidRequest("conversations are not kept by this server")
        fields = await _conversation_request(request, body)
        link, _ = await _put_items(request, fields)
        conversation_id = f"conv_{link.id.removeprefix(_ITEMS)}"
        now = int(services.clock.wall().timestamp())
        conversation = StoredResponse(chain=[link], metadata=fields.metadata or {}, created_at=now)
        if not await services.responses.put(workspace, conversation_id, lambda: conversation):
            raise InvalidRequest("items: can't be kept", "items")
        return answered(_answer(conversation_id, conversation))

    @get("/{conversation_id:str}")
    async def retrieve(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        return answered(
            _answer(conversation_id, await stored_of(request, "Conversation", conversation_id))
        )

    @post("/{conversation_id:str}", status_code=200)
    async def update(
        self, request: KeyRequest, conversation_id: FromPath[str], body: RawBody
    ) -> ASGIResponse:
        conversation = await stored_of(request, "Conversation", conversation_id)
        fields = await _conversation_request(request, body)
        if fields.items is not None:
            raise InvalidRequest("items: are added at /items", "items")
        conversation.metadata = fields.metadata or {}

        def edit(stored: StoredResponse) -> None:
            stored.metadata = conversation.metadata

        change = services_of(request).responses.change
        await change(request.user.workspace, conversation_id, edit)
        return answered(_answer(conversation_id, conversation))

    @delete("/{conversation_id:str}", status_code=200)
    async def remove(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        """Remove a conversation. Its responses stay stored, each by itself."""
        conversation = await stored_of(request, "Conversation", conversation_id)
        added_ids = [link.id for link in conversation.chain if link.id.startswith(_ITEMS)]
        await services_of(request).responses.remove([conversation_id, *added_ids])
        return answered(responses.Deleted(conversation_id, "conversation.deleted"))

    @get("/{conversation_id:str}/items", before_request=check_query)
    async def items(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        conversation = await stored_of(request, "Conversation", conversation_id)
        items = items_in(await chain_of(request, conversation.chain, "conversation"))
        return answered(responses.page_of(items, request.query_params))

    @post("/{conversation_id:str}/items", status_code=200)
    async def add(
        self, request: KeyRequest, conversation_id: FromPath[str], body: RawBody
    ) -> ASGIResponse:
        conversation = await stored_of(request, "Conversation", conversation_id)
        fields = await _conversation_request(request, body)
        if not fields.items or fields.metadata is not None:
            raise InvalidRequest("items: is required, and nothing else is changed", "items")
        before = sum(link.num_bytes for link in conversation.chain)
        check_chain(len(conversation.chain) + 1, before + len(body), "conversation")
        link, items = await _put_items(request, fields)

        def edit(stored: StoredResponse) -> None:
            stored.chain.append(link)

        change = services_of(request).responses.change
        await change(request.user.workspace, conversation_id, edit)
        all_in_order = {"order": "asc", "limit": str(len(items))}
        return answered(responses.page_of(items, all_in_order))

    @get("/{conversation_id:str}/items/{item_id:str}")
    async def item(
        self, request: KeyRequest, conversation_id: FromPath[str], item_id: FromPath[str]
    ) -> ASGIResponse:
        _, _, item = await _item(request, conversation_id, item_id)
        return ASGIResponse(body=bytes(item), media_type="application/json")

    @delete("/{conversation_id:str}/items/{item_id:str}", status_code=200)
    async def remove_item(
        self, request: KeyRequest, conversation_id: FromPath[str], item_id: FromPath[str]
    ) -> ASGIResponse:
        """Remove an item, from its response too. The response's answer stays as it was sent."""
        conversation, holder_id, _ = await _item(request, conversation_id, item_id)

        def edit(stored: StoredResponse) -> None:
            stored.items = [item for item in stored.items if id_of(item) != item_id]
            stored.output = [item for item in stored.output if id_of(item) != item_id]

        change = services_of(request).responses.change
        await change(request.user.workspace, holder_id, edit, renews=False)
        return answered(_answer(conversation_id, conversation))


_ITEMS = "items_"
"""The beginning of the id of items that a client added to a conversation."""


def _answer(conversation_id: str, conversation: StoredResponse) -> responses.ConversationShown:
    return responses.ConversationShown(
        conversation_id, conversation.created_at, conversation.metadata
    )


async def _conversation_request(request: KeyRequest, body: bytes) -> ConversationRequest:
    services = services_of(request)
    workspace = request.user.workspace
    await services.responses.check_room(workspace)
    return await services.workers.run(
        workspace, len(body), decode_conversation, body, services.bounds
    )


async def _put_items(request: KeyRequest, fields: ConversationRequest) -> tuple[Link, list[Raw]]:
    """Store the items. Raise InvalidRequest where they can't be stored."""
    services = services_of(request)
    workspace = request.user.workspace
    raw = fields.raw
    stem = secrets.token_hex(16)
    items = await services.workers.run(workspace, len(raw), items_of, raw, stem, {})
    link = await services.responses.put(
        workspace, f"{_ITEMS}{stem}", lambda: StoredResponse(items=items)
    )
    if link is None:
        raise InvalidRequest("items: can't be kept", "items")
    return link, items


async def _item(
    request: KeyRequest, conversation_id: str, item_id: str
) -> tuple[StoredResponse, str, Raw]:
    """A conversation, the id of the part of its chain that has the item, and the item. Raise
    NotFound."""
    conversation = await stored_of(request, "Conversation", conversation_id)
    chain = await chain_of(request, conversation.chain, "conversation")

    def find() -> tuple[str, Raw] | None:
        for holder_id, link in chain.items():
            for item in (*link.items, *link.output):
                if id_of(item) == item_id:
                    return holder_id, item
        return None

    num_bytes = sum(link.num_bytes for link in conversation.chain)
    place = await services_of(request).workers.run(request.user.workspace, num_bytes, find)
    if place is None:
        raise NotFound(f"Item with id '{item_id[:64]}' not found in the conversation.")
    return conversation, *place
