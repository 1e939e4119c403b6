"""GET /openapi.json: the description of the HTTP API."""

from typing import Any

import msgspec
from litestar import Controller, Litestar, get
from litestar.datastructures import State
from litestar.openapi.datastructures import ResponseSpec
from litestar.response.base import ASGIResponse

from gateway.admin.openapi.document import describe
from gateway.admin.openapi.operations import operations_of
from gateway.http.query import DeclaredQueries


class OpenApiController(Controller):
    @get(
        "/openapi.json",
        operation_id="getDescription",
        summary="This description.",
        responses={200: ResponseSpec(dict[str, Any], description="The description.")},
        sync_to_thread=False,
    )
    def openapi(self, state: State) -> ASGIResponse:
        return ASGIResponse(body=state.openapi, media_type="application/json")


def describe_once(app: Litestar) -> None:
    """Make the description of an application, once.

    The state's `openapi` becomes the document in bytes, and its `declared_queries` the parameters
    that queries are checked against.
    """
    document = describe(operations_of(app))
    app.state.openapi = msgspec.json.encode(document)
    app.state.declared_queries = _queries(document)


def _queries(document: dict[str, Any]) -> DeclaredQueries:
    return {
        (path, method): [each for each in operation["parameters"] if each["in"] == "query"]
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    }
