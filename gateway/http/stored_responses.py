"""What is stored for later requests: responses, conversations and items of OpenAI's dialect, and
Google's interactions."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Literal

import msgspec
from msgspec import Raw

from gateway.base.errors import InvalidRequest, NotFound, ResponseNotKept
from gateway.dialects.responses import response as responses
from gateway.dialects.responses.request import Decoded, items_of
from gateway.http.bodies import brought_in
from gateway.http.generation import KeyRequest
from gateway.http.services import services_of
from gateway.turn.contents import Link, StoredResponse, check_chain

_encode = msgspec.json.Encoder().encode


Kind = Literal["Conversation", "Interaction", "Response"]
PREFIXES: dict[Kind, str] = {"Conversation": "conv_", "Interaction": "v1_", "Response": "resp_"}
"""The beginnings of the ids of each kind."""


async def stored_of(request: KeyRequest, kind: Kind, stored_id: str) -> StoredResponse:
    """What is stored under this id. Raise NotFound if nothing is, or if it belongs to another
    workspace."""
    ids = [stored_id] if stored_id.startswith(PREFIXES[kind]) else []
    stored = (await stored_by_id(request, ids)).get(stored_id)
    if stored is None:
        raise NotFound(
            f"{kind} with id '{stored_id[:64]}' not found: nothing is kept under this id."
        )
    return stored


async def chain_to(
    request: KeyRequest, kind: Literal["Interaction", "Response"], stored_id: str
) -> list[Link]:
    """The chain that ends with a stored response. Raise ResponseNotKept where it is not stored."""
    try:
        stored = await stored_of(request, kind, stored_id)
    except NotFound:
        keeps = services_of(request).responses.keeps(request.user)
        raise ResponseNotKept(stored_id[:64], keeps=keeps, kind=kind.lower()) from None
    num_bytes = sum(map(len, [stored.response, *stored.items, *stored.output]))
    return [*stored.chain, Link(stored_id, num_bytes)]


async def chain_of(
    request: KeyRequest, chain: Sequence[Link], path: str
) -> dict[str, StoredResponse]:
    """What is still stored of a chain, in its order. Its bytes count as the request's own."""
    num_bytes = sum(link.num_bytes for link in chain)
    check_chain(len(chain), num_bytes, path)
    await brought_in(request.scope, num_bytes)
    stored = await stored_by_id(request, [link.id for link in chain])
    return {link.id: stored[link.id] for link in chain if link.id in stored}


async def stored_by_id(request: KeyRequest, ids: Sequence[str]) -> dict[str, StoredResponse]:
    """What is stored under these ids. It is read in one of the workspace's places for reads."""
    services = services_of(request)
    workspace = request.user.workspace
    async with services.reads["store"].taken(workspace):
        return await services.responses.find(workspace, ids)


def items_in(chain: Mapping[str, StoredResponse]) -> list[Raw]:
    """The items of a chain, in its order: each link's input, then its output."""
    items: list[Raw] = []
    for stored in chain.values():
        items += stored.items
        items += stored.output
    return items


class Continued:
    """What a request continues: a response, a conversation, or items by their ids."""

    def __init__(self, request: KeyRequest) -> None:
        self._request = request
        self._states = services_of(request).responses
        self._chain: list[Link] = []

    async def fetch(self, decoded: Decoded) -> tuple[Decoded, int]:
        """The request behind what it continues, and the bytes of what it continues. Raise
        InvalidRequest for what is not stored."""
        previous = decoded.request.previous_response_id
        conversation = decoded.request.conversation_id
        if previous is None and conversation is None and not decoded.references:
            return decoded, 0
        path = "previous_response_id" if previous else "conversation"
        if previous:
            self._chain = await chain_to(self._request, "Response", previous)
        elif conversation:
            self._chain = await self._chain_in(conversation)
        earlier = await chain_of(self._request, self._chain, path)
        if len(earlier) < len(self._chain):
            num_lost = len(self._chain) - len(earlier)
            decoded.notepad.ignore(
                path, f"{num_lost} of the responses before it are no longer kept"
            )
        # Responses are read one after the other, because their bytes are known only then.
        referenced = list[Raw]()
        num_bytes = 0
        stems = dict.fromkeys(item_id.partition("_")[2][:-2] for item_id in decoded.references)
        for number, stem in enumerate(stems, 1):
            response_id = f"resp_{stem}"
            stored = await stored_by_id(self._request, [response_id])
            output = stored[response_id].output if response_id in stored else []
            num_bytes += sum(map(len, output))
            check_chain(number, num_bytes, "input")
            referenced += output
        items = items_in(earlier)
        num_bytes += sum(map(len, items))
        services = services_of(self._request)
        join = partial(decoded.behind, items, referenced, services.bounds)
        workspace = self._request.user.workspace
        return await services.workers.run(workspace, num_bytes, join), num_bytes

    async def _chain_in(self, conversation_id: str) -> list[Link]:
        try:
            conversation = await stored_of(self._request, "Conversation", conversation_id)
        except NotFound as error:
            raise InvalidRequest(str(error), "conversation") from None
        return conversation.chain

    async def keep(self, decoded: Decoded, response: responses.Response) -> bool:
        """Store a response with its own input. Return False if it can't be stored."""
        workspace = self._request.user.workspace
        stem = response.id.removeprefix("resp_")

        def make() -> StoredResponse:
            return StoredResponse(
                items=items_of(decoded.fields["input"], stem, decoded.named),
                response=Raw(_encode(response)),
                output=[Raw(_encode(item)) for item in response.output],
                chain=self._chain,
            )

        link = await self._states.put(workspace, response.id, make)
        conversation = decoded.request.conversation_id
        if link is not None and conversation is not None:

            def edit(stored: StoredResponse) -> None:
                stored.chain.append(link)

            await self._states.change(workspace, conversation, edit)
        return link is not None
