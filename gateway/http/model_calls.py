"""The POSTs that run turns, in front of Litestar's routes.

Litestar's routing, middlewares and injection cost a request 120 µs of CPU, which is a third of what
a turn may cost. So these calls are taken out before them. Each still has its route there, which
answers the other methods, and the spellings of a path that are not looked up here. Both ways call
the same functions.
"""

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from litestar import Litestar, Request
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp, Receive, Scope, Send

from gateway.http import errors
from gateway.http.auth import principal_of
from gateway.http.bodies import Bodies
from gateway.http.completions import create_chat_completion, create_completion
from gateway.http.framing import SERVER
from gateway.http.gemini import call_model
from gateway.http.generation import KeyRequest
from gateway.http.messages import create_message
from gateway.http.query import check_query
from gateway.http.responses import create_response

Call = Callable[[KeyRequest, bytes], Awaitable[ASGIResponse]]

_CALLS: dict[str, Call] = {
    "/v1/messages": create_message,
    "/v1/chat/completions": create_chat_completion,
    "/v1/completions": create_completion,
    "/v1/responses": create_response,
}
_MODELS = ("/v1beta/models", "/v1/models")
_CHECKED_MODELS = "/v1beta/models"
_SERVER = SERVER.decode()
# RFC 9110, 9.3.7. What one path allows is told by an OPTIONS of that path.
_OPTIONS_OF_ALL = ASGIResponse(
    status_code=204, headers={"allow": "DELETE, GET, HEAD, OPTIONS, PATCH, POST"}
)


class Found(NamedTuple):
    """A call, and the template of its route."""

    call: Call
    route: str


def find(path: str) -> Found | None:
    """The call that a POST to this path is; None where its route must tell."""
    if (call := _CALLS.get(path)) is not None:
        return Found(call, path)
    models, _, name = path.rpartition("/")
    if models in _MODELS and ":" in name:
        return Found(_called_model, f"{models}/{{model_id}}")
    return None


async def _called_model(request: KeyRequest, body: bytes) -> ASGIResponse:
    """A method of a model, in Google's dialect."""
    models, _, name = request.scope["path"].rpartition("/")
    if models == _CHECKED_MODELS:
        await check_query(request)
    return await call_model(request, body, name)


class ModelCalls:
    """ASGI: serves the calls that `find` knows, and hands everything else to `rest`."""

    def __init__(self, rest: ASGIApp, bodies: Bodies) -> None:
        self._rest = rest
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = find(scope["path"]) if scope.get("method") == "POST" else None
        if found is None:
            other = _OPTIONS_OF_ALL if scope["path"] == _SERVER else self._rest
            await other(scope, receive, send)
        else:
            scope["path_template"] = found.route
            await self._serve(found.call, scope, receive, send)

    async def _serve(self, call: Call, scope: Scope, receive: Receive, send: Send) -> None:
        """Who calls, what is asked, the turn, the answer. A failure before it is an answer too."""
        request: KeyRequest = Request(scope, receive, send)
        with self._bodies.reading(scope) as reading:
            try:
                scope["user"] = await principal_of(scope)
                body = await reading.whole(receive)
                reply = await call(request, body)
            except Exception as error:  # noqa: BLE001 - the edge of a request: it has an answer
                await errors.after_exception(error, scope)
                reply = errors.reply_of(request, error)
            await reply(scope, receive, send)


def put_in_front(app: Litestar, bodies: Bodies) -> None:
    """Serve the model calls of an application by `ModelCalls`."""
    app.asgi_handler = ModelCalls(app.asgi_handler, bodies)
