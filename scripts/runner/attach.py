"""Engines that run elsewhere, for `scripts/run --attach`: most of all a vLLM with our plugin.

They are asked once before anything is started, so that one line can say what is wrong. The standard
library is enough to import this module.
"""

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from urllib.parse import urlsplit

from scripts.stack import StartError

ASK_SECONDS = 10.0
MOUNT = "/holdfast"
LEAST_SECRET = 16
"""The fewest characters of ENGINE_SECRET, as the engine itself demands."""
STARTED_SO = (
    "VLLM_PLUGINS=holdfast ENGINE_SECRET=… vllm serve MODEL …; engine/mount/distribution/README.md"
)


def url_problem(url: str) -> str | None:
    """Why an address can't be that of an engine; None if it can."""
    try:
        parts = urlsplit(url)
        is_whole = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_whole = False
    if not is_whole or "," in url or parts.query or parts.fragment:
        return "must be an address such as http://127.0.0.1:8000/holdfast"
    return None


def served_models(urls: Sequence[str], secret: str) -> list[str]:
    """Ask each engine for its model's id.

    An engine that is still loading has none to tell, and is waited for later. Raises StartError,
    with what to do, where nothing of ours answers, the secret is not its own, or it is off.
    """
    models = [_model_of(url, secret) for url in urls]
    return [model for model in models if model is not None]


def _model_of(url: str, secret: str) -> str | None:
    state, body = _ask(url, "/readyz", secret)
    if state == 404 or not isinstance(body, dict) or "ready" not in body:
        meant = "" if urlsplit(url).path.strip("/") else f"; the plugin's path is {url}{MOUNT}"
        raise StartError(
            f"`--attach {url}` answers, but has no engine of Holdfast (status {state}){meant}. "
            f"vLLM with the plugin is started so: {STARTED_SO}"
        )
    if body.get("error"):
        raise StartError(
            f"`--attach {url}` is off ({body['error']}): its own log says more, and it stays off "
            "until it is started again"
        )
    state, body = _ask(url, "/v1/describe", secret)
    if state == 401:
        raise StartError(
            f"`--attach {url}` refuses the secret: `--secret` must be its ENGINE_SECRET"
        )
    if state == 200 and isinstance(body, dict):
        return str(body["model"]).rstrip("/").rpartition("/")[2]
    return None


def _ask(url: str, path: str, secret: str) -> tuple[int, object]:
    """The status, and the body if it is JSON. Raises StartError if nothing answers."""
    headers = {"authorization": f"Bearer {secret}"}
    request = urllib.request.Request(url + path, headers=headers)
    # The gateway does not use the environment's proxies for its engines either.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=ASK_SECONDS) as reply:
            return reply.status, _json_of(reply.read())
    except urllib.error.HTTPError as refusal:
        return refusal.code, _json_of(refusal.read())
    except OSError as error:
        why = getattr(error, "reason", error)
        raise StartError(
            f"nothing answers at `--attach {url}` ({why}): start vLLM first, and have it listen "
            f"where this machine reaches it (--host). {STARTED_SO}"
        ) from error


def _json_of(body: bytes) -> object:
    try:
        return json.loads(body)
    except ValueError:
        return None
