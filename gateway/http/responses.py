"""POST /v1/responses and POST /v1/responses/input_tokens."""

from collections.abc import AsyncGenerator
from functools import partial

from litestar import Controller, delete, get, post
from litestar.params import FromPath, RawBody
from litestar.response.base import ASGIResponse
from msgspec import UNSET

from engine.protocol import InputUsage
from gateway.base.catalogue import Model
from gateway.base.errors import (
    DemandRefused,
    GatewayError,
    NotFound,
    PromptTooLong,
)
from gateway.dialects import sse
from gateway.dialects.errors import in_responses_names
from gateway.dialects.responses.lower import Prepared, prepare, seal
from gateway.dialects.responses.request import Given, decode_responses
from gateway.dialects.responses.response import (
    AppliedCacheOptions,
    ComparisonNotFound,
    Diagnostics,
    Event,
    InputTokens,
    Response,
    ResponseWriter,
    Unavailable,
    diagnostics_of,
    echo_of,
)
from gateway.http.auth import KeyAuth
from gateway.http.errors import request_id
from gateway.http.generation import (
    Items,
    KeyRequest,
    Streamed,
    answered,
    begun,
    check_media,
    gathered,
    prepared,
    written,
)
from gateway.http.presence import while_present
from gateway.http.services import Services, services_of
from gateway.prompt.ask import Ask, TurnId
from gateway.turn.state import Findings


class ResponsesController(Controller):
    path = "/v1/responses"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        check_media(request)
        services = services_of(request)
        made = await _prepared(request, services, body)
        try:
            turn_id, items, findings = await begun(request, services, made.ask)
            writer = _writer(services, made, turn_id, findings)
            if made.ask.stream:
                return Streamed(_stream(items, writer, request_id(request.scope)), items)
            return answered(await while_present(request, gathered(items, writer)))
        except (PromptTooLong, DemandRefused) as error:
            raise _in_own_names(error, made.ask) from None

    @post("/input_tokens", status_code=200)
    async def count(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        """The exact tokens of a request's prompt."""
        check_media(request)
        services = services_of(request)
        with services.counting.admitted(request.user.workspace, len(body)):
            made = await _prepared(request, services, body)
            try:
                tokens = await while_present(request, services.turns.count(made.ask))
            except PromptTooLong as error:
                raise _in_own_names(error, made.ask) from None
        return answered(InputTokens(tokens))

    @get("/{response_id:str}")
    async def retrieve(self, response_id: FromPath[str]) -> None:
        """No response is kept."""
        raise NotFound(f"Response with id '{response_id[:64]}' not found: responses are not kept.")

    @delete("/{response_id:str}", status_code=200)
    async def remove(self, response_id: FromPath[str]) -> None:
        """No response is kept."""
        raise NotFound(f"Response with id '{response_id[:64]}' not found: responses are not kept.")


async def _prepared(request: KeyRequest, services: Services, body: bytes) -> Prepared:
    arrived = request.scope["state"]["arrived"]

    def read() -> tuple[Given, int]:
        return decode_responses(body, services.bounds), 0

    def make(given: Given, _: int, model: Model) -> Prepared:
        return prepare(given, request.user, model, arrived, services.unreadable)

    return await prepared(request, services, len(body), read, make)


def _in_own_names(error: GatewayError, ask: Ask) -> GatewayError:
    return in_responses_names(error, [slot.path for slot in ask.plan.slots])


def _writer(
    services: Services, made: Prepared, turn_id: TurnId, findings: Findings
) -> ResponseWriter:
    """The response's id is the turn's, in OpenAI's form."""
    ask, request = made.ask, made.given.request
    options = request.prompt_cache_options
    response = Response(
        id=f"resp_{turn_id.removeprefix('msg_')}",
        created_at=int(services.clock.wall().timestamp()),
        status="in_progress",
        model=ask.model.id,
        prompt_cache_options=UNSET
        if options is None
        else AppliedCacheOptions(
            mode=options.mode, comparison_response_id=options.comparison_response_id or UNSET
        ),
        **echo_of(made.given.fields),  # type: ignore[arg-type]
    )
    return ResponseWriter(
        id=response.id,
        model=response.model,
        response=response,
        found=findings,
        paths=[slot.path for slot in ask.plan.slots],
        diagnose=partial(_diagnose, findings),
        origins=made.origins,
        summarizes=bool(request.reasoning and request.reasoning.wants_summary),
        seal=partial(seal, scope=ask.principal.scope) if made.seals_thoughts else None,
        is_prewarm=request.is_prewarm,
    )


def _diagnose(findings: Findings, usage: InputUsage) -> Diagnostics | None:
    diagnosis = findings.diagnosis
    match diagnosis and diagnosis.found:
        case None:
            return None
        case "not_found":
            return ComparisonNotFound()
        case "unfinished":
            return Unavailable()
        case _:
            divergence = diagnosis.divergence if diagnosis else None
            return diagnostics_of(
                divergence.kind if divergence else None,
                divergence.missed_tokens if divergence else None,
                has_read=usage.cache_read_tokens > 0,
            )


async def _stream(
    items: Items, writer: ResponseWriter, request_id: str
) -> AsyncGenerator[bytes, None]:
    """Yield the stream's events; frames that came together go out together."""
    try:
        async for events in written(items, writer):
            yield b"".join(map(_framed, events)) or sse.COMMENT
    except GatewayError as error:
        yield _framed(writer.fail(in_responses_names(error, writer.paths), request_id))


def _framed(event: Event) -> bytes:
    return sse.event(str(event.__struct_config__.tag), event)
