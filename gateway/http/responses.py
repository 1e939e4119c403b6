"""The calls of OpenAI's Responses API: turns, and the stored responses."""

import re
from functools import partial

from litestar import Controller, delete, get, post
from litestar.params import FromPath, RawBody
from litestar.response.base import ASGIResponse
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from gateway.base.errors import DemandRefused, GatewayError, PromptTooLong
from gateway.dialects import sse
from gateway.dialects.collector import Event, Findings
from gateway.dialects.errors import in_responses_names
from gateway.dialects.responses import response as responses
from gateway.dialects.responses.compaction import (
    compacted,
    decode_compaction,
    prepare_compaction,
)
from gateway.dialects.responses.lower import Prepared, prepare, seal
from gateway.dialects.responses.request import (
    REASONING,
    Conversation,
    decode_responses,
)
from gateway.http.auth import KeyAuth
from gateway.http.errors import request_id
from gateway.http.generation import (
    KeyRequest,
    Stream,
    answer_settled,
    answered,
    begun,
    gathered,
    prepared,
    while_present,
)
from gateway.http.query import check_query
from gateway.http.services import Services, services_of
from gateway.http.stored_responses import Continued, stored_of
from gateway.prompt.ask import TurnId

_NAMES_STORED = re.compile(rb'"(?:previous_response_id|conversation|item_reference)"|"id"')


class ResponsesController(Controller):
    """/v1/responses: responses, stored ones, and the counts of requests."""

    path = "/v1/responses"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        services = services_of(request)
        earlier = Continued(request)
        fetch = earlier.fetch if _NAMES_STORED.search(body) else None
        lowered = await prepared(request, body, decode_responses, prepare, fetch)
        ask = lowered.ask
        failed_id = request_id(request.scope)
        store = lowered.decoded.request.store
        if lowered.decoded.request.is_prewarm:
            may_keep = bool(store)
        else:
            may_keep = store is not False
        keeps = may_keep and services.responses.keeps(request.user)
        if keeps:
            await services.responses.check_room(request.user.workspace)

        def stream_of(writer: responses.ResponseWriter) -> Stream[Event]:
            if keeps:
                writer.response = replace(writer.response, store=True)

            async def settle(events: list[Event]) -> None:
                """Store the response. If it can't be stored, the last event says so."""
                if not writer.response.store:
                    return
                if not await earlier.keep(lowered.decoded, writer.response):
                    writer.response = replace(writer.response, store=False)
                    for event in events[-1:]:
                        event["response"] = writer.response

            def failed(error: GatewayError) -> bytes:
                failure = in_responses_names(error, writer.paths)
                return _response_event(writer.fail(failure, failed_id))

            return Stream(
                render=lambda events: b"".join(map(_response_event, events)),
                failed=failed,
                settle=settle,
            )

        try:
            make_writer = partial(_response_writer, services, lowered)
            return await answer_settled(
                request, ask, make_writer, stream_of, lambda writer: writer.response
            )
        except (PromptTooLong, DemandRefused) as error:
            raise in_responses_names(error, ask.plan.paths) from None

    @post("/input_tokens", status_code=200)
    async def count(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        """The exact tokens of a request's prompt."""
        services = services_of(request)
        fetch = Continued(request).fetch if _NAMES_STORED.search(body) else None
        with services.counting.admitted(request.user.workspace, len(body)):
            lowered = await prepared(request, body, decode_responses, prepare, fetch)
            try:
                tokens = await while_present(request.scope, services.turns.count(lowered.ask))
            except PromptTooLong as error:
                raise in_responses_names(error, lowered.ask.plan.paths) from None
        return answered(responses.InputTokens(tokens))

    @post("/compact", status_code=200)
    async def compact(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        """Let the model summarize a conversation. The answer stands for the conversation."""
        services = services_of(request)
        fetch = Continued(request).fetch if _NAMES_STORED.search(body) else None
        lowered = await prepared(request, body, decode_compaction, prepare_compaction, fetch)
        ask = lowered.ask
        try:
            running = begun(request, ask, partial(_response_writer, services, lowered))
            turn_events, writer = await while_present(request.scope, running)
            response = await while_present(request.scope, gathered(turn_events, writer))
        except (PromptTooLong, DemandRefused) as error:
            raise in_responses_names(error, ask.plan.paths) from None
        scope = ask.principal.scope
        num_bytes = ask.plan.num_bytes
        make = partial(compacted, lowered.decoded, response, scope)
        return answered(await services.workers.run(request.user.workspace, num_bytes, make))

    @get("/{response_id:str}")
    async def retrieve(self, request: KeyRequest, response_id: FromPath[str]) -> ASGIResponse:
        stored = await stored_of(request, "Response", response_id)
        return ASGIResponse(body=bytes(stored.response), media_type="application/json")

    @delete("/{response_id:str}", status_code=200)
    async def remove(self, request: KeyRequest, response_id: FromPath[str]) -> ASGIResponse:
        await stored_of(request, "Response", response_id)
        await services_of(request).responses.remove([response_id])
        return answered(responses.Deleted(response_id, "response"))

    @get("/{response_id:str}/input_items", before_request=check_query)
    async def input_items(self, request: KeyRequest, response_id: FromPath[str]) -> ASGIResponse:
        """The response's own input, without what came before it."""
        stored = await stored_of(request, "Response", response_id)
        return answered(responses.page_of(stored.items, request.query_params))


def _response_writer(
    services: Services, lowered: Prepared, turn_id: TurnId, findings: Findings
) -> responses.ResponseWriter:
    """The writer of a response, whose id is the turn's in OpenAI's form."""
    ask = lowered.ask
    request = lowered.decoded.request
    options = request.prompt_cache_options
    applied_options: responses.AppliedCacheOptions | UnsetType = UNSET
    if options is not None:
        applied_options = responses.AppliedCacheOptions(
            mode=options.mode,
            ttl=options.ttl,
            comparison_response_id=options.comparison_response_id or UNSET,
        )
    response = responses.Response(
        id=f"resp_{turn_id.removeprefix('msg_')}",
        created_at=int(services.clock.wall().timestamp()),
        status="in_progress",
        model=ask.model.id,
        prompt_cache_options=applied_options,
        conversation=Conversation(request.conversation_id) if request.conversation_id else UNSET,
        **responses.echo_of(lowered.decoded.fields),  # type: ignore[arg-type]
    )
    return responses.ResponseWriter(
        id=response.id,
        model=response.model,
        response=response,
        findings=findings,
        paths=ask.plan.paths,
        origins=lowered.origins,
        summarizes=bool(request.reasoning and request.reasoning.wants_summary),
        seal=partial(seal, scope=ask.principal.scope) if REASONING in request.include else None,
        is_prewarm=request.is_prewarm,
    )


def _response_event(event: Event) -> bytes:
    return sse.event(event["type"], event)
