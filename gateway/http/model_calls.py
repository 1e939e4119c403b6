"""The calls that run turns: Messages, Chat Completions, Completions, Responses and Gemini's.

Each reads its body, lowers it to an Ask, runs the turn and writes the answer in its dialect.
"""

import re
import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Annotated, Any

import msgspec
from litestar import Controller, delete, get, post
from litestar.params import FromPath, HeaderParameter, RawBody
from litestar.response.base import ASGIResponse
from msgspec import UNSET, Raw
from msgspec.structs import replace

from engine.protocol import Frame
from gateway.base.bounds import RequestBounds
from gateway.base.errors import (
    DemandRefused,
    GatewayError,
    InvalidRequest,
    NotFound,
    PromptTooLong,
    ResponseNotKept,
)
from gateway.dialects import sse
from gateway.dialects.anthropic import lower as anthropic
from gateway.dialects.anthropic import request as messages
from gateway.dialects.anthropic import response as answers
from gateway.dialects.collector import Event, Findings
from gateway.dialects.errors import anthropic_error, body_of, in_responses_names
from gateway.dialects.gemini import lower as gemini
from gateway.dialects.gemini import response as gemini_answers
from gateway.dialects.gemini.request import GenerateRequest, decode_count, decode_generate
from gateway.dialects.lowering import Asked
from gateway.dialects.openai import request as chat
from gateway.dialects.openai.lower import chat_ask_of, completion_ask_of
from gateway.dialects.openai.response import ChatWriter, TextWriter
from gateway.dialects.responses import response as responses
from gateway.dialects.responses.lower import Prepared, prepare, seal
from gateway.dialects.responses.request import (
    REASONING,
    Conversation,
    ConversationRequest,
    Given,
    decode_conversation,
    decode_responses,
    id_of,
    items_of,
)
from gateway.http.auth import KeyAuth
from gateway.http.bodies import brought_in
from gateway.http.cached_contents import held_by
from gateway.http.errors import request_id
from gateway.http.generation import (
    KeyRequest,
    Stream,
    Streamed,
    answer,
    answered,
    begun,
    gathered,
    prepared,
    while_present,
)
from gateway.http.query import check_query
from gateway.http.services import Services, services_of
from gateway.http.speaking import header_of
from gateway.prompt.ask import Ask, Compared, TurnId
from gateway.turn.contents import Kept, Link, check_chain

VersionHeader = Annotated[str | None, HeaderParameter(name="anthropic-version")]
_encode = msgspec.json.Encoder().encode


# Messages.


class MessagesController(Controller):
    """POST /v1/messages and POST /v1/messages/count_tokens."""

    path = "/v1/messages"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        check_attribution(request)
        services = services_of(request)
        scope = request.scope
        version = check_version(header_of(scope, b"anthropic-version"))
        betas = header_of(scope, b"anthropic-beta") or ""

        def make(decoded: messages.MessagesRequest, asked: Asked) -> Ask:
            wanted = decoded.diagnostics
            compared = Compared(
                is_wanted=wanted is not None,
                previous=wanted.previous_message_id if wanted else None,
                parameters=anthropic.prompt_parameters(decoded, betas),
            )
            return anthropic.ask_of(
                decoded,
                asked,
                version,
                comparison=compared,
                betas=betas,
                marks_for_client=services.auto_cache_messages,
            )

        ask = await prepared(request, body, messages.decode_messages, make)
        stream = _message_stream(request) if ask.stream else None
        return await answer(request, ask, partial(_message_writer, ask), stream)

    @post("/count_tokens", status_code=200)
    async def count_tokens(
        self, request: KeyRequest, body: RawBody, anthropic_version: VersionHeader = None
    ) -> answers.TokenCount:
        check_attribution(request)
        services = services_of(request)
        version = check_version(anthropic_version)

        def make(decoded: messages.CountTokensRequest, asked: Asked) -> Ask:
            return anthropic.count_ask_of(decoded, asked, version)

        with services.counting.admitted(request.user.workspace, len(body)):
            ask = await prepared(request, body, messages.decode_count_tokens, make)
            return answers.TokenCount(await while_present(request.scope, services.turns.count(ask)))


def check_attribution(request: KeyRequest) -> None:
    """Check two parameters that the SDK sends as headers."""
    if header_of(request.scope, b"anthropic-user-profile-id"):
        raise InvalidRequest("anthropic-user-profile-id: user profiles are not supported")
    workspace = header_of(request.scope, b"anthropic-workspace-id")
    if workspace not in (None, "", request.user.workspace):
        raise InvalidRequest("anthropic-workspace-id: does not match the workspace of the API key")


def check_version(version: str | None) -> messages.Version:
    if not version:
        raise InvalidRequest("anthropic-version: header is required")
    for known in messages.VERSIONS:
        if version == known:
            return known
    raise InvalidRequest(f'anthropic-version: "{version[:32]}" is not a valid version')


def whole_message(
    ask: Ask, turn_id: TurnId, findings: Findings, frames: Sequence[Frame]
) -> answers.Message:
    """The whole message of a turn that is not streamed, from all of its frames."""
    writer = _message_writer(ask, turn_id, findings)
    writer.take_all(frames)
    return writer.whole()


def _message_writer(ask: Ask, turn_id: TurnId, findings: Findings) -> answers.MessageWriter:
    return answers.MessageWriter(
        id=turn_id,
        model=ask.model.id,
        paths=ask.plan.paths,
        findings=findings,
        omits_thinking=ask.omit_thinking,
        hides_thinking=not ask.thinking,
    )


def _message_stream(request: KeyRequest) -> Stream[Event]:
    failed_id = request_id(request.scope)
    has_pinged = False

    def render(events: list[Event]) -> bytes:
        nonlocal has_pinged
        pieces: list[bytes] = []
        for event in events:
            pieces.append(sse.event(event["type"], event))
            if event["type"] == "content_block_start" and not has_pinged:
                has_pinged = True
                pieces.append(sse.PING)
        return b"".join(pieces)

    def failed(error: GatewayError) -> bytes:
        return sse.event("error", anthropic_error(error, failed_id))

    return Stream(render=render, failed=failed)


# Chat Completions and Completions.


class ChatCompletionsController(Controller):
    """POST /v1/chat/completions."""

    path = "/v1/chat/completions"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        ask = await prepared(request, body, chat.decode_chat, chat_ask_of)
        return await _complete(request, ask, ChatWriter, "chatcmpl")


class CompletionsController(Controller):
    """POST /v1/completions."""

    path = "/v1/completions"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        ask = await prepared(request, body, chat.decode_completion, completion_ask_of)
        return await _complete(request, ask, TextWriter, "cmpl")


async def _complete(
    request: KeyRequest, ask: Ask, kind: type[ChatWriter] | type[TextWriter], prefix: str
) -> ASGIResponse:
    """Run the turn. The response's id is the turn's, in OpenAI's form."""

    def make(turn_id: TurnId, findings: Findings) -> Any:
        return kind(
            id=f"{prefix}-{turn_id.removeprefix('msg_')}",
            model=ask.model.id,
            created=int(services_of(request).clock.wall().timestamp()),
            findings=findings,
            paths=ask.plan.paths,
            num_choices=ask.sampling.num_choices,
            include_usage=not ask.stream or ask.include_usage,
        )

    stream: Stream[Any] = Stream(
        render=lambda chunks: b"".join(map(sse.data, chunks)),
        failed=lambda error: sse.data(body_of(error, request_id(request.scope), "openai")),
        last=sse.DONE,
    )
    return await answer(request, ask, make, stream if ask.stream else None)


# Responses.

_NAMES_KEPT = re.compile(rb'"(?:previous_response_id|conversation|item_reference)"|"id"')


class ResponsesController(Controller):
    """/v1/responses: responses, what is kept of them, and the counts of requests."""

    path = "/v1/responses"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        services = services_of(request)
        behind = _Behind(request)
        fetch = behind.fetch if _NAMES_KEPT.search(body) else None
        made = await prepared(request, body, decode_responses, prepare, fetch)
        ask = made.ask
        failed_id = request_id(request.scope)
        asked = made.given.request
        keeps = services.responses.keeps(request.user) and asked.store is not False
        keeps = keeps and not asked.is_prewarm
        if keeps:
            await services.responses.check_room(request.user.workspace)
        try:
            make_writer = partial(_response_writer, services, made)
            running = begun(request, ask, make_writer)
            turn_events, writer = await while_present(request.scope, running)
            if keeps:
                writer.response = replace(writer.response, store=True)

            async def settle(events: list[Event]) -> None:
                if writer.response.store and not await behind.keep(made.given, writer.response):
                    writer.response = replace(writer.response, store=False)
                    for event in events[-1:]:
                        event["response"] = writer.response

            def failed(error: GatewayError) -> bytes:
                named = in_responses_names(error, writer.paths)
                return _response_event(writer.fail(named, failed_id))

            stream: Stream[Event] = Stream(
                render=lambda events: b"".join(map(_response_event, events)),
                failed=failed,
                settle=settle,
            )
            if ask.stream:
                return Streamed(stream, turn_events, writer)
            await while_present(request.scope, gathered(turn_events, writer))
            await settle([])
            return answered(writer.response)
        except (PromptTooLong, DemandRefused) as error:
            raise in_responses_names(error, ask.plan.paths) from None

    @post("/input_tokens", status_code=200)
    async def count(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        """The exact tokens of a request's prompt."""
        services = services_of(request)
        fetch = _Behind(request).fetch if _NAMES_KEPT.search(body) else None
        with services.counting.admitted(request.user.workspace, len(body)):
            made = await prepared(request, body, decode_responses, prepare, fetch)
            try:
                tokens = await while_present(request.scope, services.turns.count(made.ask))
            except PromptTooLong as error:
                raise in_responses_names(error, made.ask.plan.paths) from None
        return answered(responses.InputTokens(tokens))

    @post("/compact", status_code=200)
    async def compact(self, request: KeyRequest) -> None:
        """Raise InvalidRequest: what the vendor makes is sealed, for its own models alone."""
        raise InvalidRequest(
            "compact: this server makes no compaction items, which models here could not read;"
            " ask for a summary with a request of its own, and go on with that"
        )

    @get("/{response_id:str}")
    async def retrieve(self, request: KeyRequest, response_id: FromPath[str]) -> ASGIResponse:
        kept = await _kept(request, "Response", response_id)
        return ASGIResponse(body=bytes(kept.response), media_type="application/json")

    @delete("/{response_id:str}", status_code=200)
    async def remove(self, request: KeyRequest, response_id: FromPath[str]) -> ASGIResponse:
        await _kept(request, "Response", response_id)
        await services_of(request).responses.remove([response_id])
        return answered(responses.Deleted(response_id, "response"))

    @get("/{response_id:str}/input_items", before_request=check_query)
    async def input_items(self, request: KeyRequest, response_id: FromPath[str]) -> ASGIResponse:
        """The response's own input, without what came before it."""
        kept = await _kept(request, "Response", response_id)
        return answered(responses.page_of(kept.items, request.query_params))


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
        given = await _conversation_request(request, body)
        first, _ = await _put_items(request, given)
        made_id = f"conv_{first.id.removeprefix(_ITEMS)}"
        now = int(services.clock.wall().timestamp())
        kept = Kept(chain=[first], metadata=given.metadata or {}, created_at=now)
        if not await services.responses.put(workspace, made_id, lambda: kept):
            raise InvalidRequest("items: can't be kept", "items")
        return answered(_shown(made_id, kept))

    @get("/{conversation_id:str}")
    async def retrieve(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        return answered(
            _shown(conversation_id, await _kept(request, "Conversation", conversation_id))
        )

    @post("/{conversation_id:str}", status_code=200)
    async def update(
        self, request: KeyRequest, conversation_id: FromPath[str], body: RawBody
    ) -> ASGIResponse:
        kept = await _kept(request, "Conversation", conversation_id)
        given = await _conversation_request(request, body)
        if given.items is not None:
            raise InvalidRequest("items: are added at /items", "items")
        kept.metadata = given.metadata or {}

        def edit(changed: Kept) -> None:
            changed.metadata = kept.metadata

        change = services_of(request).responses.change
        await change(request.user.workspace, conversation_id, edit)
        return answered(_shown(conversation_id, kept))

    @delete("/{conversation_id:str}", status_code=200)
    async def remove(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        """Its responses are kept still, each by itself."""
        kept = await _kept(request, "Conversation", conversation_id)
        own = [link.id for link in kept.chain if link.id.startswith(_ITEMS)]
        await services_of(request).responses.remove([conversation_id, *own])
        return answered(responses.Deleted(conversation_id, "conversation.deleted"))

    @get("/{conversation_id:str}/items", before_request=check_query)
    async def items(self, request: KeyRequest, conversation_id: FromPath[str]) -> ASGIResponse:
        kept = await _kept(request, "Conversation", conversation_id)
        found = _items_in(await _chain(request, kept.chain, "conversation"))
        return answered(responses.page_of(found, request.query_params))

    @post("/{conversation_id:str}/items", status_code=200)
    async def add(
        self, request: KeyRequest, conversation_id: FromPath[str], body: RawBody
    ) -> ASGIResponse:
        kept = await _kept(request, "Conversation", conversation_id)
        given = await _conversation_request(request, body)
        if not given.items or given.metadata is not None:
            raise InvalidRequest("items: is required, and nothing else is changed", "items")
        before = sum(link.num_bytes for link in kept.chain)
        check_chain(len(kept.chain) + 1, before + len(body), "conversation")
        link, items = await _put_items(request, given)

        def edit(changed: Kept) -> None:
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
        """It is gone from its response too, but for the answer as that was given."""
        kept, holder, _ = await _item(request, conversation_id, item_id)

        def edit(changed: Kept) -> None:
            changed.items = [one for one in changed.items if id_of(one) != item_id]
            changed.output = [one for one in changed.output if id_of(one) != item_id]

        change = services_of(request).responses.change
        await change(request.user.workspace, holder, edit, renews=False)
        return answered(_shown(conversation_id, kept))


_ITEMS = "items_"
"""What the id of items that a client added to a conversation begins with."""


def _shown(conversation_id: str, kept: Kept) -> responses.ConversationShown:
    return responses.ConversationShown(conversation_id, kept.created_at, kept.metadata)


async def _conversation_request(request: KeyRequest, body: bytes) -> ConversationRequest:
    services = services_of(request)
    workspace = request.user.workspace
    await services.responses.check_room(workspace)
    run = services.workers.run
    bounds = services.bounds
    return await run(workspace, len(body), decode_conversation, body, bounds)


async def _put_items(request: KeyRequest, given: ConversationRequest) -> tuple[Link, list[Raw]]:
    """Keep the items. Raise InvalidRequest where they can't be kept."""
    services = services_of(request)
    workspace = request.user.workspace
    raw = given.raw
    stem = secrets.token_hex(16)
    items = await services.workers.run(workspace, len(raw), items_of, raw, stem, {})
    link = await services.responses.put(workspace, f"{_ITEMS}{stem}", lambda: Kept(items=items))
    if link is None:
        raise InvalidRequest("items: can't be kept", "items")
    return link, items


async def _item(request: KeyRequest, conversation_id: str, item_id: str) -> tuple[Kept, str, Raw]:
    """A conversation, what of its chain has the item, and the item. Raise NotFound."""
    kept = await _kept(request, "Conversation", conversation_id)
    found = await _chain(request, kept.chain, "conversation")

    def places() -> tuple[str, Raw] | None:
        each = ((where, item) for where, one in found.items() for item in (*one.items, *one.output))
        return next(((where, item) for where, item in each if id_of(item) == item_id), None)

    num_bytes = sum(link.num_bytes for link in kept.chain)
    place = await services_of(request).workers.run(request.user.workspace, num_bytes, places)
    if place is None:
        raise NotFound(f"Item with id '{item_id[:64]}' not found in the conversation.")
    return kept, *place


async def _kept(request: KeyRequest, what: str, kept_id: str) -> Kept:
    """Raise NotFound for one that is not kept, or another workspace's."""
    ids = [kept_id] if kept_id.startswith("conv_" if what == "Conversation" else "resp_") else []
    found = (await _found(request, ids)).get(kept_id)
    if found is None:
        raise NotFound(f"{what} with id '{kept_id[:64]}' not found: none is kept of this id.")
    return found


async def _chain(request: KeyRequest, chain: Sequence[Link], path: str) -> dict[str, Kept]:
    """What is kept of a chain, in its order. Its bytes count as if the request had sent them."""
    num_bytes = sum(link.num_bytes for link in chain)
    check_chain(len(chain), num_bytes, path)
    await brought_in(request.scope, num_bytes)
    found = await _found(request, [link.id for link in chain])
    return {link.id: found[link.id] for link in chain if link.id in found}


async def _found(request: KeyRequest, ids: Sequence[str]) -> dict[str, Kept]:
    """Those of these that are kept, in one of the workspace's places for reads."""
    services = services_of(request)
    workspace = request.user.workspace
    async with services.reads["store"].taken(workspace):
        return await services.responses.find(workspace, ids)


def _items_in(found: Mapping[str, Kept]) -> list[Raw]:
    return [item for kept in found.values() for item in (*kept.items, *kept.output)]


class _Behind:
    """What a request goes on with: a response, a conversation, items by their ids."""

    def __init__(self, request: KeyRequest) -> None:
        self._request = request
        self._states = services_of(request).responses
        self._chain: list[Link] = []

    async def fetch(self, given: Given) -> tuple[Given, int]:
        """The request behind what is kept, and the bytes of that. Raise InvalidRequest for what is
        not kept."""
        asked = given.request
        workspace = self._request.user.workspace
        previous = asked.previous_response_id
        conversation = asked.conversation_id
        head = previous or conversation
        if head is None and not given.references:
            return given, 0
        path = "previous_response_id" if previous else "conversation"
        if head is not None:
            try:
                kept = await _kept(self._request, "Response" if previous else "Conversation", head)
            except NotFound as error:
                raise (
                    ResponseNotKept(head[:64]) if previous else InvalidRequest(str(error), path)
                ) from None
            self._chain = kept.chain
            if previous:
                num_bytes = sum(map(len, [kept.response, *kept.items, *kept.output]))
                self._chain = [*kept.chain, Link(previous, num_bytes)]
        earlier = await _chain(self._request, self._chain, path)
        if len(earlier) < len(self._chain):
            lost = len(self._chain) - len(earlier)
            given.notepad.ignore(path, f"of the responses before {lost} are kept no longer")
        # One after the other: how long they are is known when they are there.
        others = list[Raw]()
        num_bytes = 0
        stems = dict.fromkeys(one.partition("_")[2][:-2] for one in given.references)
        for number, stem in enumerate(stems, 1):
            found = await _found(self._request, [f"resp_{stem}"])
            output = [item for one in found.values() for item in one.output]
            num_bytes += sum(map(len, output))
            check_chain(number, num_bytes, "input")
            others += output
        items = _items_in(earlier)
        run = services_of(self._request).workers.run
        num_bytes += sum(map(len, items))
        behind = partial(given.behind, items, others, services_of(self._request).bounds)
        return await run(workspace, num_bytes, behind), num_bytes

    async def keep(self, given: Given, response: responses.Response) -> bool:
        """Keep a response with its own input; False where that can't be."""
        workspace = self._request.user.workspace
        stem = response.id.removeprefix("resp_")

        def make() -> Kept:
            return Kept(
                items=items_of(given.fields["input"], stem, given.named),
                response=Raw(_encode(response)),
                output=[Raw(_encode(item)) for item in response.output],
                chain=self._chain,
            )

        link = await self._states.put(workspace, response.id, make)
        conversation = given.request.conversation_id
        if link is not None and conversation is not None:

            def edit(kept: Kept) -> None:
                kept.chain.append(link)

            await self._states.change(workspace, conversation, edit)
        return link is not None


def _response_writer(
    services: Services, made: Prepared, turn_id: TurnId, findings: Findings
) -> responses.ResponseWriter:
    """The response's id is the turn's, in OpenAI's form."""
    ask = made.ask
    request = made.given.request
    options = request.prompt_cache_options
    response = responses.Response(
        id=f"resp_{turn_id.removeprefix('msg_')}",
        created_at=int(services.clock.wall().timestamp()),
        status="in_progress",
        model=ask.model.id,
        prompt_cache_options=UNSET
        if options is None
        else responses.AppliedCacheOptions(
            mode=options.mode, comparison_response_id=options.comparison_response_id or UNSET
        ),
        conversation=Conversation(request.conversation_id) if request.conversation_id else UNSET,
        **responses.echo_of(made.given.fields),  # type: ignore[arg-type]
    )
    return responses.ResponseWriter(
        id=response.id,
        model=response.model,
        response=response,
        findings=findings,
        paths=ask.plan.paths,
        origins=made.origins,
        summarizes=bool(request.reasoning and request.reasoning.wants_summary),
        seal=partial(seal, scope=ask.principal.scope) if REASONING in request.include else None,
        is_prewarm=request.is_prewarm,
    )


def _response_event(event: Event) -> bytes:
    return sse.event(event["type"], event)


# Gemini.

_GENERATE = "generateContent"
_STREAM = "streamGenerateContent"
_COUNT = "countTokens"


async def call_gemini_model(request: KeyRequest, body: bytes, model_id: str) -> ASGIResponse:
    """Answer a call of a model's method. `model_id` ends in `:` and the method. A stream is a list
    of JSON objects, or server-sent events where the query says `alt=sse`. Raise NotFound for an
    unknown method."""
    model, _, method = model_id.lstrip("/").rpartition(":")
    if method not in (_GENERATE, _STREAM, _COUNT):
        raise NotFound(f"method: no method `{method[:64]}` of a model")
    services = services_of(request)
    held = None

    def read(body: bytes, bounds: RequestBounds) -> GenerateRequest:
        if method == _COUNT:
            return decode_count(body, model, bounds)
        return decode_generate(body, model, bounds, is_streamed=method == _STREAM)

    async def fetch(decoded: GenerateRequest) -> tuple[GenerateRequest, int]:
        nonlocal held
        found = services.find_model(decoded.model)
        held, num_bytes = await held_by(request, decoded, found) or (None, 0)
        return decoded, num_bytes

    def lower(decoded: GenerateRequest, asked: Asked) -> tuple[Ask, bool]:
        ask = gemini.ask_of(decoded, asked, stream=method == _STREAM, held=held)
        return ask, decoded.generation_config.is_enum

    if method == _COUNT:
        with services.counting.admitted(request.user.workspace, len(body)):
            ask, _ = await prepared(request, body, read, lower, fetch)
            tokens = await while_present(request.scope, services.turns.count(ask))
        details = [gemini_answers.ModalityCount(token_count=tokens)]
        return answered(
            gemini_answers.TokenCount(total_tokens=tokens, prompt_tokens_details=details)
        )
    ask, is_enum = await prepared(request, body, read, lower, fetch)

    def make(turn_id: TurnId, findings: Findings) -> gemini_answers.GeminiWriter:
        return gemini_answers.GeminiWriter(
            id=turn_id,
            model=ask.model.id,
            findings=findings,
            paths=ask.plan.paths,
            num_choices=ask.sampling.num_choices,
            hides_thinking=ask.omit_thinking,
            is_enum=is_enum,
        )

    stream = None
    if method == _STREAM:
        has_events = request.query_params.get("alt") == "sse"
        made_of = _gemini_events if has_events else _gemini_list
        stream = made_of(request_id(request.scope))
    return await answer(request, ask, make, stream)


def _gemini_events(failed_id: str) -> Stream[gemini_answers.GenerateContentResponse]:
    """The next event is always begun, and a heartbeat is a space in it. Some clients (Genkit,
    `@google/generative-ai`) take all that stands between two events for a broken one, also a blank
    line."""

    def render(chunks: list[gemini_answers.GenerateContentResponse]) -> bytes:
        pieces: list[bytes] = []
        for chunk in chunks:
            is_last = chunk.usage_metadata is not UNSET
            pieces += (_encode(chunk), sse.END if is_last else sse.NEXT)
        return b"".join(pieces)

    def failed(error: GatewayError) -> bytes:
        return _encode(body_of(error, failed_id, "gemini")) + sse.END

    return Stream(render=render, failed=failed, first=sse.OPEN, idle=sse.SPACE)


def _gemini_list(failed_id: str) -> Stream[gemini_answers.GenerateContentResponse]:
    """One JSON list over the whole stream. Blanks keep the connection alive."""
    separator = b"["

    def render(chunks: list[gemini_answers.GenerateContentResponse]) -> bytes:
        nonlocal separator
        pieces = []
        for chunk in chunks:
            pieces += [separator, _encode(chunk)]
            separator = b",\r\n"
        return b"".join(pieces)

    def failed(error: GatewayError) -> bytes:
        return separator + _encode(body_of(error, failed_id, "gemini"))

    return Stream(
        render=render,
        failed=failed,
        last=b"]",
        idle=b"\n",
        is_closed=True,
        content_type=b"application/json",
    )
