"""Which dialect a request speaks. Errors come in that dialect, also where the request
has no route.

A path that only one dialect has decides. Clients of all dialects use `/v1/models` and `/v1/cache/`.
There Anthropic's clients are known by their version header, and Google's by where they put their
key or by calling a model. All others speak OpenAI's dialect.
"""

from collections.abc import Mapping
from typing import Any
from urllib.parse import parse_qs

from gateway.prompt.ask import Dialect

OPENAI_PATHS = tuple(
    f"/v1/{name}" for name in ("chat", "completions", "conversations", "embeddings", "responses")
)
GEMINI_PATHS = ("/v1beta/", "/v1/cachedContents", "/v1/interactions")
GOOGLE_KEY_HEADER = b"x-goog-api-key"
ID_HEADERS: dict[Dialect, str] = {
    "anthropic": "request-id",
    "openai": "x-request-id",
    "gemini": "x-request-id",
}
"""The header of a response that has the request's id."""
_MODELS = "/v1/models"
_OF_ALL = (_MODELS, "/v1/cache/")
_MESSAGES = "/v1/messages"


def dialect_of(scope: Mapping[str, Any]) -> Dialect:
    path: str = scope["path"]
    if not path.startswith(_OF_ALL):
        dialect = dialect_of_path(path)
        if dialect != "anthropic" or path.startswith(_MESSAGES):
            return dialect
        # Google's SDK asks for unserved paths under names that Anthropic's API has as well.
        is_google = any(name.lower() == GOOGLE_KEY_HEADER for name, _ in scope["headers"])
        return "gemini" if is_google else dialect
    names = {name.lower() for name, _ in scope["headers"]}
    is_post = scope["method"] == "POST" and path.startswith(_MODELS)
    is_call = is_post or is_google_call(path)
    if is_call or GOOGLE_KEY_HEADER in names or google_key_in_query(scope):
        return "gemini"
    return "anthropic" if b"anthropic-version" in names else "openai"


def dialect_of_path(path: str) -> Dialect:
    if path.startswith(GEMINI_PATHS) or is_google_call(path):
        return "gemini"
    return "openai" if path.startswith(OPENAI_PATHS) else "anthropic"


def is_google_call(path: str) -> bool:
    """Whether the path ends in a method of a model, such as `…/models/x:generateContent`.

    An adapter's name may follow a colon too, so the endings of methods' names decide.
    """
    method = path.rpartition("/")[2].rpartition(":")[2]
    return path.startswith(_MODELS) and method.endswith(("Content", "Contents", "Tokens"))


def google_key_in_query(scope: Mapping[str, Any]) -> str | None:
    """The key of `?key=`. Only this reads it, and the query is never logged."""
    query: bytes = scope.get("query_string", b"")
    if b"key=" not in query:
        return None
    try:
        return parse_qs(query.decode("ascii"), max_num_fields=64).get("key", [None])[0]
    except ValueError:
        return None


def headers_of(scope: Mapping[str, Any]) -> Mapping[bytes, bytes]:
    """The first header of each name, in lower case. The mapping is made at the first call."""
    state: dict[str, Any] = scope["state"]
    if "headers" not in state:
        state["headers"] = dict(reversed(scope["headers"]))
    headers: dict[bytes, bytes] = state["headers"]
    return headers


def header_of(scope: Mapping[str, Any], name: bytes) -> str | None:
    """The first header of that name, which is given in lower case; None without one. Litestar would
    decode all headers of the request."""
    value = headers_of(scope).get(name)
    return None if value is None else value.decode("latin-1")
