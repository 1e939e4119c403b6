"""POST /v1/messages and POST /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator
from functools import partial
from typing import Annotated

from litestar import Controller, post
from litestar.params import HeaderParameter, RawBody
from litestar.response.base import ASGIResponse

from gateway.base.catalogue import Model
from gateway.base.errors import GatewayError, InvalidRequest
from gateway.dialects import sse
from gateway.dialects.anthropic.lower import ask_of, count_ask_of, prompt_parameters
from gateway.dialects.anthropic.request import (
    VERSIONS,
    CountTokensRequest,
    MessagesRequest,
    Version,
    decode_count_tokens,
    decode_messages,
)
from gateway.dialects.anthropic.response import (
    BlockStart,
    Diagnostics,
    Message,
    MessageWriter,
    PreviousMessageNotFound,
    TokenCount,
    changed,
)
from gateway.dialects.errors import anthropic_error
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
    until_taken,
    written,
)
from gateway.http.presence import while_present
from gateway.http.services import services_of
from gateway.http.speaking import header_of
from gateway.prompt.ask import Ask, Compared, TurnId
from gateway.turn.state import Findings

VersionHeader = Annotated[str | None, HeaderParameter(name="anthropic-version")]


class MessagesController(Controller):
    path = "/v1/messages"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        check_media(request)
        check_attribution(request)
        services, scope = services_of(request), request.scope
        version = check_version(header_of(scope, b"anthropic-version"))
        arrived, betas = scope["state"]["arrived"], header_of(scope, b"anthropic-beta") or ""

        def read() -> tuple[MessagesRequest, int]:
            return services.without_nonces(decode_messages(body, services.bounds))

        def make(decoded: MessagesRequest, num_removed: int, model: Model) -> Ask:
            asked = decoded.diagnostics
            compared = Compared(
                is_wanted=asked is not None,
                previous=asked.previous_message_id if asked else None,
                parameters=prompt_parameters(decoded, betas),
            )
            return ask_of(
                decoded,
                request.user,
                model,
                version,
                arrived,
                comparison=compared,
                num_removed=num_removed,
                betas=betas,
                unreadable=services.unreadable,
                marks_for_client=services.auto_cache_messages,
            )

        ask = await prepared(request, services, len(body), read, make)
        turn_id, items, findings = await begun(request, services, ask)
        writer = _writer(ask, turn_id, findings)
        if ask.stream:
            return Streamed(_stream(items, writer, request_id(scope)), items)
        return answered(await while_present(request, gathered(items, writer)))

    @post("/count_tokens", status_code=200)
    async def count_tokens(
        self, request: KeyRequest, body: RawBody, anthropic_version: VersionHeader = None
    ) -> TokenCount:
        check_media(request)
        check_attribution(request)
        services, version = services_of(request), check_version(anthropic_version)
        arrived = request.scope["state"]["arrived"]

        def read() -> tuple[CountTokensRequest, int]:
            return services.without_nonces(decode_count_tokens(body, services.bounds))

        def make(decoded: CountTokensRequest, _: int, model: Model) -> Ask:
            return count_ask_of(decoded, request.user, model, version, arrived, services.unreadable)

        with services.counting.admitted(request.user.workspace, len(body)):
            ask = await prepared(request, services, len(body), read, make)
            return TokenCount(await while_present(request, services.turns.count(ask)))


def check_attribution(request: KeyRequest) -> None:
    """Check two parameters that the SDK sends as headers."""
    if header_of(request.scope, b"anthropic-user-profile-id"):
        raise InvalidRequest("anthropic-user-profile-id: user profiles are not supported")
    workspace = header_of(request.scope, b"anthropic-workspace-id")
    if workspace not in (None, "", request.user.workspace):
        raise InvalidRequest("anthropic-workspace-id: does not match the workspace of the API key")


def check_version(version: str | None) -> Version:
    if not version:
        raise InvalidRequest("anthropic-version: header is required")
    for known in VERSIONS:
        if version == known:
            return known
    raise InvalidRequest(f'anthropic-version: "{version[:32]}" is not a valid version')


async def whole(items: Items, ask: Ask, turn_id: TurnId) -> Message:
    """The whole message of a turn that is not streamed."""
    taken = await until_taken(items)
    return await gathered(items, _writer(ask, turn_id, taken.findings))


def _writer(ask: Ask, turn_id: TurnId, findings: Findings) -> MessageWriter:
    return MessageWriter(
        id=turn_id,
        model=ask.model.id,
        paths=[slot.path for slot in ask.plan.slots],
        found=findings,
        diagnose=partial(_diagnostics, findings),
        omits_thinking=ask.omit_thinking,
        hides_thinking=not ask.thinking,
    )


def _diagnostics(findings: Findings) -> Diagnostics | None:
    """The wire's None stands for "no divergence", "not asked for" and "first turn"."""
    diagnosis = findings.diagnosis
    match diagnosis and diagnosis.found:
        case "unfinished":
            return Diagnostics(None)
        case "not_found":
            return Diagnostics(PreviousMessageNotFound())
        case "compared" if diagnosis is not None and diagnosis.divergence is not None:
            return changed(diagnosis.divergence.kind, diagnosis.divergence.missed_tokens)
        case _:
            return None


async def _stream(
    items: Items, writer: MessageWriter, request_id: str
) -> AsyncGenerator[bytes, None]:
    """Yield the stream's events; frames that came together go out together."""
    has_pinged = False
    try:
        async for events in written(items, writer):
            pieces: list[bytes] = []
            for event in events:
                pieces.append(sse.event(str(event.__struct_config__.tag), event))
                if isinstance(event, BlockStart) and not has_pinged:
                    has_pinged = True
                    pieces.append(sse.PING)
            # A heartbeat, or thinking that is not shown: keep the connection alive.
            yield b"".join(pieces) or sse.COMMENT
    except GatewayError as error:
        yield sse.event("error", anthropic_error(error, request_id))
