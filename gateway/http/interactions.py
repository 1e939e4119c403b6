"""The calls of Google's Interactions API: turns, and the stored interactions.

Interactions are stored as the responses of OpenAI's API are, and for as long. None runs in the
background, so none can be cancelled.
"""

from functools import partial

import msgspec
from litestar import Controller, delete, get, post
from litestar.params import FromPath, RawBody
from litestar.response.base import ASGIResponse
from msgspec import UNSET, Raw

from gateway.base.errors import DemandRefused, GatewayError, InvalidRequest, PromptTooLong
from gateway.dialects import sse
from gateway.dialects.collector import Event, Findings
from gateway.dialects.errors import gemini_error, in_responses_names
from gateway.dialects.gemini.lower import HeldContent
from gateway.dialects.gemini.response import Nothing
from gateway.dialects.interactions.lower import Prepared, prepare
from gateway.dialects.interactions.request import Decoded, decode_interaction, kept_steps
from gateway.dialects.interactions.response import Interaction, InteractionWriter
from gateway.dialects.lowering import RequestContext
from gateway.http.auth import KeyAuth
from gateway.http.cached_contents import held_by
from gateway.http.errors import request_id
from gateway.http.generation import (
    KeyRequest,
    Stream,
    answer_settled,
    answered,
    prepared,
)
from gateway.http.query import check_query
from gateway.http.services import Services, services_of
from gateway.http.stored_responses import PREFIXES, chain_of, chain_to, items_in, stored_of
from gateway.prompt.ask import TurnId
from gateway.turn.contents import Link, StoredResponse

_PREVIOUS = "previous_interaction_id"
_SCHEMA = "response_format.schema"
_encode = msgspec.json.Encoder().encode
_object = msgspec.json.Decoder(dict[str, Raw])


class InteractionsController(Controller):
    path = "/v1beta/interactions"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        services = services_of(request)
        earlier = _Earlier(request)
        decoded, ask = await prepared(
            request, body, decode_interaction, earlier.lower, earlier.fetch
        )
        failed_id = request_id(request.scope)
        keeps = decoded.request.store and services.responses.keeps(request.user)
        if keeps:
            await services.responses.check_room(request.user.workspace)
        lowered = Prepared(decoded, ask)

        def stream_of(writer: InteractionWriter) -> Stream[Event]:
            async def settle(events: list[Event]) -> None:
                """Store the interaction. If it can't be stored, the last event says so."""
                if keeps and not await earlier.keep(decoded, writer.interaction):
                    writer.tell_unkept()
                    for event in events[-1:]:
                        event["interaction"] = writer.interaction

            def failed(error: GatewayError) -> bytes:
                failure = in_responses_names(error, writer.paths, _SCHEMA)
                return _event_bytes(_error_event(failure, failed_id))

            return Stream(
                render=lambda events: b"".join(map(_event_bytes, events)),
                failed=failed,
                last=sse.DONE,
                settle=settle,
            )

        try:
            make_writer = partial(_writer, services, lowered)
            return await answer_settled(
                request, ask, make_writer, stream_of, lambda writer: writer.interaction
            )
        except (PromptTooLong, DemandRefused) as error:
            raise in_responses_names(error, ask.plan.paths, _SCHEMA) from None

    @get("/{interaction_id:str}", before_request=check_query)
    async def retrieve(self, request: KeyRequest, interaction_id: FromPath[str]) -> ASGIResponse:
        """The interaction; with `include_input=true` also the steps that it was asked with."""
        query = request.query_params
        if query.get("stream") == "true":
            raise InvalidRequest("stream: an interaction is streamed only while it is made")
        stored = await stored_of(request, "Interaction", interaction_id)
        body = bytes(stored.response)
        if query.get("include_input") == "true":
            body = _encode({**_object.decode(body), "input": stored.items})
        return ASGIResponse(body=body, media_type="application/json")

    @delete("/{interaction_id:str}", status_code=200)
    async def remove(self, request: KeyRequest, interaction_id: FromPath[str]) -> ASGIResponse:
        await stored_of(request, "Interaction", interaction_id)
        await services_of(request).responses.remove([interaction_id])
        return answered(Nothing())

    @post("/{interaction_id:str}/cancel", status_code=200)
    async def cancel(self, request: KeyRequest, interaction_id: FromPath[str]) -> ASGIResponse:
        await stored_of(request, "Interaction", interaction_id)
        raise InvalidRequest("id: only an interaction in the background can be cancelled")


class InteractionsAtV1Controller(InteractionsController):
    """The path that Google's SDKs ask where they are told no version."""

    path = "/v1/interactions"


class _Earlier:
    """What a request continues: an earlier interaction, and a cached content."""

    def __init__(self, request: KeyRequest) -> None:
        self._request = request
        self._chain: list[Link] = []
        self._held: HeldContent | None = None

    async def fetch(self, decoded: Decoded) -> tuple[Decoded, int]:
        """The request behind what it continues, and the bytes of what it continues. Raise
        InvalidRequest for an interaction that is not stored, and NotFound for a missing cached
        content."""
        services = services_of(self._request)
        model = services.find_model(decoded.model)
        name = decoded.request.cached_content or None
        num_bytes = 0
        content = await held_by(self._request, name, model, "cached_content")
        if content is not None:
            self._held, num_bytes = content
        previous = decoded.request.previous_interaction_id
        if not previous:
            return decoded, num_bytes
        self._chain = await chain_to(self._request, "Interaction", previous)
        earlier = await chain_of(self._request, self._chain, _PREVIOUS)
        steps = items_in(earlier)
        num_earlier_bytes = sum(map(len, steps))
        num_lost = len(self._chain) - len(earlier)
        join = partial(decoded.behind, steps, num_lost, services.bounds)
        workspace = self._request.user.workspace
        whole = await services.workers.run(workspace, num_earlier_bytes, join)
        return whole, num_bytes + num_earlier_bytes

    def lower(self, decoded: Decoded, context: RequestContext) -> Prepared:
        return prepare(decoded, context, self._held)

    async def keep(self, decoded: Decoded, interaction: Interaction) -> bool:
        """Store an interaction with its own input. Return False if it can't be stored."""

        def make() -> StoredResponse:
            steps = [] if interaction.steps is UNSET else interaction.steps
            return StoredResponse(
                items=kept_steps(decoded.input),
                response=Raw(_encode(interaction)),
                output=[Raw(_encode(step)) for step in steps],
                chain=self._chain,
            )

        states = services_of(self._request).responses
        link = await states.put(self._request.user.workspace, interaction.id, make)
        return link is not None


def _writer(
    services: Services, lowered: Prepared, turn_id: TurnId, findings: Findings
) -> InteractionWriter:
    """The writer of an interaction, whose id is the turn's in Google's form."""
    ask = lowered.ask
    now = services.clock.wall().isoformat(timespec="seconds").replace("+00:00", "Z")
    interaction = Interaction(
        id=f"{PREFIXES['Interaction']}{turn_id.removeprefix('msg_')}",
        model=ask.model.id,
        status="in_progress",
        created=now,
        updated=now,
        previous_interaction_id=lowered.decoded.request.previous_interaction_id or UNSET,
    )
    return InteractionWriter(
        id=interaction.id,
        model=interaction.model,
        interaction=interaction,
        findings=findings,
        paths=ask.plan.paths,
        hides_thinking=ask.omit_thinking,
    )


def _error_event(failure: GatewayError, failed_id: str) -> Event:
    """The event that ends a stream which failed. Its code is a word, as Google's types have it."""
    detail = gemini_error(failure, failed_id).error
    return {"event_type": "error", "error": {"code": detail.status, "message": detail.message}}


def _event_bytes(event: Event) -> bytes:
    return sse.event(event["event_type"], event)
