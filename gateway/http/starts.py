"""Why the gateway could not start, in one line of its log."""

from collections.abc import Awaitable, Callable
from typing import Any

from litestar.datastructures import State

_Application = Callable[[Any, Any, Any], Awaitable[None]]


def telling_start(app: _Application, state: State) -> _Application:
    """The application, which tells the server its `start_failure` in place of a traceback.

    Only errors that the gateway knows have one (`app.py`). Any other has its traceback.
    """

    async def served(scope: Any, receive: Any, send: Any) -> None:
        async def tell(message: Any) -> None:
            if message["type"] == "lifespan.startup.failed" and "start_failure" in state:
                message = {**message, "message": state.start_failure}
            await send(message)

        await app(scope, receive, tell if scope["type"] == "lifespan" else send)

    return served
