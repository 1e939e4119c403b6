"""What every controller of the admin API has in common."""

from typing import Any

import msgspec
from litestar import Controller, get, post
from litestar.di import NamedDependency

from gateway.admin.bodies import JsonBody
from gateway.http.auth import OWN_WORKSPACE, AdminAuth
from gateway.http.query import check_query
from gateway.http.services import Services

Deps = NamedDependency[Services]
"""The gateway's parts, as a parameter of a handler."""


class AdminController(Controller):
    """Every request needs a key that may see what it asks for.

    Every query parameter must be what the description of the API says.
    """

    middleware = (AdminAuth,)
    before_request = staticmethod(check_query)


def view(path: str, operation_id: str, summary: str) -> get:
    """The decorator of a handler that reads, also for keys that see their own workspace alone."""
    return get(path, operation_id=operation_id, summary=summary, opt=OWN_WORKSPACE)


def action(
    path: str,
    operation_id: str,
    summary: str,
    body: type[msgspec.Struct] | None = None,
    **opt: Any,
) -> post:
    """The decorator of a handler that changes something and answers 200.

    With a `body` the handler takes it as its parameter `asked`.
    """
    return post(
        path,
        operation_id=operation_id,
        summary=summary,
        status_code=200,
        dependencies={} if body is None else {"asked": JsonBody(body)},
        opt=opt,
    )
