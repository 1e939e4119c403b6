"""POST /v1/messages and POST /v1/messages/count_tokens."""

from collections.abc import AsyncGenerator, Iterator
from functools import partial
from typing import Annotated

from litestar import Controller, post
from litestar.di import NamedDependency
from litestar.params import HeaderParameter, RawBody
from litestar.response.base import ASGIResponse

from engine.protocol import Frame
from gateway.base.catalogue import Model
from gateway.base.errors import GatewayError, InvalidRequest
from gateway.dialects import sse
from gateway.dialects.anthropic.lower import ask_of, count_ask_of
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
    Event,
    Message,
    MessageWriter,
    TokenCount,
)
from gateway.dialects.errors import anthropic_error
from gateway.http.auth import KeyAuth
from gateway.http.errors import origin_of, request_id
from gateway.http.findings import compared, diagnostics_of
from gateway.http.generation import (
    Items,
    KeyRequest,
    answered,
    check_media,
    gathered,
    prepared,
    streamed,
    until_taken,
)
from gateway.http.heads import header_of
from gateway.http.presence import while_present
from gateway.http.services import Services, services_of
from gateway.prompt.ask import Ask, TurnId
from gateway.turn.turn import Taken

VersionHeader = Annotated[str | None, HeaderParameter(name="anthropic-version")]


class MessagesController(Controller):
    path = "/v1/messages"
    middleware = (KeyAuth,)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        return await create_message(request, body)

    @post("/count_tokens", status_code=200)
    async def count_tokens(
        self,
        request: KeyRequest,
        body: RawBody,
        services: NamedDependency[Services],
        anthropic_version: VersionHeader = None,
    ) -> TokenCount:
        check_media(request)
        check_attribution(request)
        version = check_version(anthropic_version)
        arrived = request.scope["state"]["arrived"]

        def read() -> tuple[CountTokensRequest, int]:
            return services.without_nonces(decode_count_tokens(body, services.bounds))

        def make(decoded: CountTokensRequest, _: int, model: Model) -> Ask:
            return count_ask_of(decoded, request.user, model, version, arrived, services.unreadable)

        with services.counting.admitted(request.user.workspace, len(body)):
            ask = await prepared(request, services, len(body), read, make)
            return TokenCount(await while_present(request, services.turns.count(ask)))


async def create_message(request: KeyRequest, body: bytes) -> ASGIResponse:
    """Answer a Messages request."""
    check_media(request)
    check_attribution(request)
    services, scope = services_of(request), request.scope
    version = check_version(header_of(scope, b"anthropic-version"))
    arrived, betas = scope["state"]["arrived"], header_of(scope, b"anthropic-beta") or ""

    def read() -> tuple[MessagesRequest, int]:
        return services.without_nonces(decode_messages(body, services.bounds))

    def make(decoded: MessagesRequest, num_removed: int, model: Model) -> Ask:
        return ask_of(
            decoded,
            request.user,
            model,
            version,
            arrived,
            comparison=compared(decoded, betas),
            num_removed=num_removed,
            betas=betas,
            unreadable=services.unreadable,
            marks_for_client=services.auto_cache_messages,
        )

    ask = await prepared(request, services, len(body), read, make)
    turn_id = services.turns.new_id()
    items = services.turns.run(ask, turn_id, origin_of(request))
    if not ask.stream:
        return answered(await while_present(request, whole(items, ask, turn_id)))
    writer = await while_present(request, _begin(items, ask, turn_id))
    return streamed(_stream(items, writer, request_id(request.scope)), items)


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


async def _begin(items: Items, ask: Ask, turn_id: TurnId) -> MessageWriter:
    taken = await until_taken(items)
    return MessageWriter(
        id=turn_id,
        model=ask.model.id,
        paths=[slot.path for slot in ask.plan.slots],
        found=taken.findings,
        diagnose=partial(diagnostics_of, taken.findings),
        omits_thinking=ask.omit_thinking,
        hides_thinking=not ask.thinking,
    )


async def whole(items: Items, ask: Ask, turn_id: TurnId) -> Message:
    """The whole message of a turn that is not streamed."""
    return await gathered(items, await _begin(items, ask, turn_id))


async def _stream(
    items: Items, writer: MessageWriter, request_id: str
) -> AsyncGenerator[bytes, None]:
    """Yield the stream's events; frames that came together go out together."""
    has_pinged = False
    try:
        async for item in items:
            pieces: list[bytes] = []
            for event in _events(item, writer):
                pieces.append(sse.event(str(event.__struct_config__.tag), event))
                if isinstance(event, BlockStart) and not has_pinged:
                    has_pinged = True
                    pieces.append(sse.PING)
            # A heartbeat, or thinking that is not shown: keep the connection alive.
            yield b"".join(pieces) if pieces else sse.COMMENT
    except GatewayError as error:
        yield sse.event("error", anthropic_error(error, request_id))


def _events(item: Taken | list[Frame], writer: MessageWriter) -> Iterator[Event]:
    if not isinstance(item, Taken):
        for frame in item:
            yield from writer.write(frame)
