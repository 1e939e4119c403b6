"""Error messages for a path or a method that is not served: they name the nearest one that is.

Most such requests come from a client whose base URL ends in `/v1` and should not, or should and
does not.
"""

from difflib import get_close_matches

PATH_CHARACTERS = 100
SERVED = {
    "/messages": "/v1/messages",
    "/messages/count_tokens": "/v1/messages/count_tokens",
    "/messages/batches": "/v1/messages/batches",
    "/chat/completions": "/v1/chat/completions",
    "/completions": "/v1/completions",
    "/responses": "/v1/responses",
    "/models": "/v1/models",
}
"""The paths of the model APIs, by what follows the version."""
_VERSIONS = ("/v1", "/v1beta")
_MODEL_METHODS = (":generateContent", ":streamGenerateContent", ":countTokens")


def path_told(path: str) -> str:
    """What a 404 says of a path that has no route. The path is cut at PATH_CHARACTERS."""
    shown = path[:PATH_CHARACTERS]
    rest = shown.rstrip("/")
    while rest.startswith(tuple(f"{version}/" for version in _VERSIONS)):
        rest = rest[rest.index("/", 1) :]
    if not rest or rest in _VERSIONS:
        return "not found: this is an API, described at /openapi.json; turns go to /v1/messages"
    if rest.endswith(_MODEL_METHODS):
        meant = f"/v1beta/models/MODEL:{rest.rpartition(':')[2]}"
    elif close := get_close_matches(rest, SERVED, n=1, cutoff=0.8):
        meant = SERVED[close[0]]
    else:
        return f"not found: {shown}"
    told = f"not found: {shown}; did you mean {meant}?"
    if rest in SERVED:
        told += " Anthropic's SDKs take a base URL without /v1, OpenAI's take one that ends in /v1."
    return told


def method_told(method: str, allowed: str) -> str:
    """What a 405 says. `allowed` is the response's header, such as `GET, OPTIONS`."""
    others = [one for one in allowed.split(", ") if one and one not in ("OPTIONS", "HEAD")]
    return f"method not allowed: {method}" + (f"; use {' or '.join(others)}" if others else "")
