"""The calls of OpenAI's Conversations API: chains of kept responses and items."""

import secrets

from litestar import Controller, delete, get, post
from litestar.params import FromPath, RawBody
from litestar.response.base import ASGIResponse
from msgspec import Raw

from gateway.base.errors import (
    InvalidRequest,
    NotFound,
)
from gateway.dialects.responses import response as responses
from gateway.dialects.responses.request import (
    ConversationRequest,
    decode_conversation,
    items_of,
)
from gateway.dialects.responses.typed import id_of
from gateway.http.auth import KeyAuth
from gateway.http.generation import (
    KeyRequest,
    answered,
)
from gateway.http.query import check_query
from gateway.http.services import services_of
from gateway.http.stored_responses import chain_of, items_in, kept_of
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
        wanted = await _conversation_request(request, body)
        first, _ = await _put_items(request, wanted)
        conversation_id = f"conv_{first.id.removeprefix(_ITEMS)}"
        now = int(services.clock.wall().timestamp())
        kept = StoredResponse(chain=[first], metadata=wanted.metadata or {}, created_at=now)
        if not await services.responses.put(workspace, conversation_id, lambda: kept):
            raise InvalidRequest("items: can't be kept", "items")
        return answered(_shown(conversation_id, kept))

    @get("/{conversation_id:str}")
    async def retrieve(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        return answered(
            _shown(conversation_id, await kept_of(request, "Conversation", conversation_id))
        )

    @post("/{conversation_id:str}", status_code=200)
    async def update(
        self, request: KeyRequest, conversation_id: FromPath[str], body: RawBody
    ) -> ASGIResponse:
        kept = await kept_of(request, "Conversation", conversation_id)
        wanted = await _conversation_request(request, body)
        if wanted.items is not None:
            raise InvalidRequest("items: are added at /items", "items")
        kept.metadata = wanted.metadata or {}

        def edit(changed: StoredResponse) -> None:
            changed.metadata = kept.metadata

        change = services_of(request).responses.change
        await change(request.user.workspace, conversation_id, edit)
        return answered(_shown(conversation_id, kept))

    @delete("/{conversation_id:str}", status_code=200)
    async def remove(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        """Its responses are kept still, each by itself."""
        kept = await kept_of(request, "Conversation", conversation_id)
        added = [link.id for link in kept.chain if link.id.startswith(_ITEMS)]
        await services_of(request).responses.remove([conversation_id, *added])
        return answered(responses.Deleted(conversation_id, "conversation.deleted"))

    @get("/{conversation_id:str}/items", before_request=check_query)
    async def items(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        kept = await kept_of(request, "Conversation", conversation_id)
        items = items_in(await chain_of(request, kept.chain, "conversation"))
        return answered(responses.page_of(items, request.query_params))

    @post("/{conversation_id:str}/items", status_code=200)
    async def add(
        self, request: KeyRequest, conversation_id: FromPath[str], body: RawBody
    ) -> ASGIResponse:
        kept = await kept_of(request, "Conversation", conversation_id)
        wanted = await _conversation_request(request, body)
        if not wanted.items or wanted.metadata is not None:
            raise InvalidRequest("items: is required, and nothing else is changed", "items")
        before = sum(link.num_bytes for link in kept.chain)
        check_chain(len(kept.chain) + 1, before + len(body), "conversation")
        link, items = await _put_items(request, wanted)

        def edit(changed: StoredResponse) -> None:
            changed.chain.append(link)

        change = services_of(request).responses.change
        await change(request.user.workspace, conversation_id, edit)
        whole = {"order": "asc", "limit": str(len(items))}
        return answered(responses.page_of(items, whole))

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
        """It is gone from its response too, but for the answer as that was wanted."""
        kept, holder, _ = await _item(request, conversation_id, item_id)

        def edit(changed: StoredResponse) -> None:
            changed.items = [item for item in changed.items if id_of(item) != item_id]
            changed.output = [item for item in changed.output if id_of(item) != item_id]

        change = services_of(request).responses.change
        await change(request.user.workspace, holder, edit, renews=False)
        return answered(_shown(conversation_id, kept))


_ITEMS = "items_"
"""What the id of items that a client added to a conversation begins with."""


def _shown(conversation_id: str, kept: StoredResponse) -> responses.ConversationShown:
    return responses.ConversationShown(conversation_id, kept.created_at, kept.metadata)


async def _conversation_request(request: KeyRequest, body: bytes) -> ConversationRequest:
    services = services_of(request)
    workspace = request.user.workspace
    await services.responses.check_room(workspace)
    run = services.workers.run
    bounds = services.bounds
    return await run(workspace, len(body), decode_conversation, body, bounds)


async def _put_items(request: KeyRequest, wanted: ConversationRequest) -> tuple[Link, list[Raw]]:
    """Keep the items. Raise InvalidRequest where they can't be kept."""
    services = services_of(request)
    workspace = request.user.workspace
    raw = wanted.raw
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
    """A conversation, what of its chain has the item, and the item. Raise NotFound."""
    kept = await kept_of(request, "Conversation", conversation_id)
    chain = await chain_of(request, kept.chain, "conversation")

    def find() -> tuple[str, Raw] | None:
        for holder, link in chain.items():
            for item in (*link.items, *link.output):
                if id_of(item) == item_id:
                    return holder, item
        return None

    num_bytes = sum(link.num_bytes for link in kept.chain)
    place = await services_of(request).workers.run(request.user.workspace, num_bytes, find)
    if place is None:
        raise NotFound(f"Item with id '{item_id[:64]}' not found in the conversation.")
    return kept, *place
