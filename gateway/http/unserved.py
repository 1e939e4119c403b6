"""Messages for paths and methods that are not served. They name the nearest served one.

Most such requests come from a client whose base URL wrongly ends in `/v1`, or wrongly does not.
"""

from difflib import get_close_matches

_SHOWN_CHARACTERS = 100
_SERVED = {
    "/messages": "/v1/messages",
    "/messages/count_tokens": "/v1/messages/count_tokens",
    "/messages/batches": "/v1/messages/batches",
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/responses": "/v1/responses",
    "/responses/input_tokens": "/v1/responses/input_tokens",
    "/models": "/v1/models",
    "/interactions": "/v1/interactions",
}
"""The paths of the model APIs, by what follows the version."""
_NOT_DONE = {
    "agents": "runs no agents",
    "assistants": "keeps no assistants",
    "audio": "hears and speaks nothing",
    "batches": "has batches at /v1/messages/batches only",
    "embeddings": "makes no embeddings",
    "files": "keeps no files",
    "fine_tuning": "tunes no models",
    "images": "makes no images",
    "moderations": "moderates nothing",
    "realtime": "has no realtime connections",
    "rerank": "ranks nothing",
    "sessions": "runs no agents",
    "skills": "keeps no skills",
    "threads": "keeps no conversations: send the whole of one with each request",
    "uploads": "keeps no files",
    "vector_stores": "searches no files",
    "videos": "makes no videos",
}
"""Calls of the vendors' APIs that have no part here, by the first word after the version."""
_VERSIONS = ("/v1", "/v1beta")
_MODEL_METHODS = (":generateContent", ":streamGenerateContent", ":countTokens")


def not_found_message(path: str) -> str:
    """The message of a 404 for a path without a route. The path is cut at _SHOWN_CHARACTERS."""
    path_shown = path[:_SHOWN_CHARACTERS]
    rest = path_shown.rstrip("/")
    while rest.startswith(tuple(f"{version}/" for version in _VERSIONS)):
        rest = rest[rest.index("/", 1) :]
    if not rest or rest in _VERSIONS:
        return "not found: this is an API, described at /openapi.json; turns go to /v1/messages"
    if rest.endswith(_MODEL_METHODS):
        suggestion = f"/v1beta/models/MODEL:{rest.rpartition(':')[2]}"
    else:
        nearest = get_close_matches(rest, _SERVED, n=1, cutoff=0.8)
        if not nearest:
            first = rest.lstrip("/").partition("/")[0]
            reason = f"; this server {_NOT_DONE[first]}" if first in _NOT_DONE else ""
            return f"not found: {path_shown}{reason}"
        suggestion = _SERVED[nearest[0]]
    message = f"not found: {path_shown}; did you mean {suggestion}?"
    if rest in _SERVED:
        message += (
            " Anthropic's SDKs take a base URL without /v1, OpenAI's take one that ends in /v1."
        )
    return message


def not_allowed_message(method: str, allowed: str) -> str:
    """The message of a 405. `allowed` is the response's header, such as `GET, OPTIONS`."""
    methods = [name for name in allowed.split(", ") if name and name not in ("OPTIONS", "HEAD")]
    advice = f"; use {' or '.join(methods)}" if methods else ""
    return f"method not allowed: {method}{advice}"
