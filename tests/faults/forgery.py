"""Requests through vLLM's own routes with `kv_transfer_params` that a client made up.

Which routes take them is read from the server's own OpenAPI document, so that a route of a later
version is noticed. `/invocations` and `/v1/chat/completions/batch` tell of no such parameter, and
pass bodies on to routes that take it. Places within another parameter are named one by one.
"""

import json
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

FIELD = "kv_transfer_params"
KEY = "holdfast"
Body = dict[str, Any]
Draw = random.Random


def words(seed: int, count: int) -> str:
    draw = random.Random(seed)
    return " ".join(
        f"{draw.choice('bcdfgklmnprst')}{draw.choice('aeiou')}{draw.randrange(99)}"
        for _ in range(count)
    )


def _messages(draw: Draw) -> list[Body]:
    return [{"role": "user", "content": words(draw.randrange(50), 60)}]


def _completion(draw: Draw) -> Body:
    return {"prompt": words(draw.randrange(50), 60), "max_tokens": 1}


def _chat(draw: Draw) -> Body:
    return {"messages": _messages(draw), "max_tokens": 1}


def _batch(draw: Draw) -> Body:
    return {"messages": [_messages(draw), _messages(draw)], "max_tokens": 1}


def _responses(draw: Draw) -> Body:
    return {"input": words(draw.randrange(50), 60), "max_output_tokens": 1}


def _ids(draw: Draw) -> Body:
    ids = [20 + draw.randrange(3000) for _ in range(100)]
    return {"token_ids": ids, "sampling_params": {"max_tokens": 1}}


def _within_sampling(draw: Draw, params: Any) -> Body:
    """What vLLM's server makes of the parameter, written by the client itself."""
    body = _ids(draw)
    body["sampling_params"]["extra_args"] = {FIELD: params}
    return body


def _within_xargs(draw: Draw, params: Any) -> Body:
    """`vllm_xargs` takes texts, numbers and lists of them under any name."""
    value = json.dumps(params) if draw.random() < 0.5 else ["holdfast", 1]
    return {**_chat(draw), "vllm_xargs": {FIELD: value}}


BODIES: dict[str, Callable[[Draw], Body]] = {
    "/v1/completions": _completion,
    "/v1/chat/completions": _chat,
    "/v1/chat/completions/batch": _batch,
    "/v1/messages": _chat,
    "/v1/responses": _responses,
    "/inference/v1/generate": _ids,
    "/invocations": _chat,
    "/v1/completions/render": _completion,
    "/v1/chat/completions/render": _chat,
    "/v1/messages/render": _chat,
    "/v1/responses/render": _responses,
}
WITHIN: dict[tuple[str, str], Callable[[Draw, Any], Body]] = {
    ("/inference/v1/generate", "sampling_params.extra_args"): _within_sampling,
    ("/v1/chat/completions", "vllm_xargs"): _within_xargs,
}


def forged(draw: Draw) -> Any:
    """`kv_transfer_params` as a client may forge them."""
    want = {"key": "ab" * 16, "tokens": draw.choice([32, 992, 10**9]), "expires_at": 9e18}
    ours: Body = {
        "request_id": draw.choice(["forged", "x/1"]),
        "scope": draw.choice(["x", ""]),
        "wants": [want] * draw.choice([0, 1, 20]),
        "watches": [{"key": "w", "tokens": 64}] * draw.choice([0, 2]),
        "read": draw.choice([None, "ab" * 16]),
        "token": draw.choice(["", "0" * 64, None, 7, "\ud800", ["x"]]),
    }
    for name in draw.sample(sorted(ours), draw.choice([0, 0, 1, 2])):
        del ours[name]
    return {KEY: draw.choice([ours, ours, ours, [ours], "x", 3])}


@dataclass
class Forgeries:
    """Answers by route: how many were 200, and how many failed (5xx) for our key only."""

    answered: dict[str, int] = field(default_factory=dict)
    sent: dict[str, int] = field(default_factory=dict)
    failed: int = 0

    def send(self, client: httpx.Client, model: str, count: int, seed: int = 5) -> None:
        """`count` requests, to all routes in turns that this server has."""
        draw = Draw(seed)
        paths = document(client)["paths"]
        routes = [(path, "") for path in BODIES if path in paths]
        routes += [place for place in WITHIN if place[0] in paths]
        for index in range(count):
            path, place = routes[index % len(routes)]
            params = forged(draw)
            if place:
                body = WITHIN[path, place](draw, params)
            else:
                body = {**BODIES[path](draw), FIELD: params}
            self._send_one(client, path, place, json.dumps({"model": model, **body}))

    def _send_one(self, client: httpx.Client, path: str, place: str, body: str) -> None:
        headers = {"content-type": "application/json"}
        answer = client.post(path, content=body, headers=headers)
        name = f"{path} {place}".strip()
        self.sent[name] = self.sent.get(name, 0) + 1
        self.answered[name] = self.answered.get(name, 0) + (answer.status_code == 200)
        if answer.status_code >= 500:
            # vLLM itself fails on some of them, whoever they are for.
            others = re.sub(rf'{KEY}(?=\\?")', "anothers", body)  # not in the model's name
            self.failed += client.post(path, content=others, headers=headers).status_code < 500


def untried(client: httpx.Client) -> list[str]:
    """Routes of this server that take the parameter, and that no body is known for."""
    openapi = document(client)
    schemas = openapi["components"]["schemas"]
    return [
        path
        for path, methods in openapi["paths"].items()
        for operation in methods.values()
        for content in operation.get("requestBody", {}).get("content", {}).values()
        if _takes(content.get("schema", {}), schemas) and path not in BODIES
    ]


def document(client: httpx.Client) -> Body:
    openapi: Body = client.get("/openapi.json").raise_for_status().json()
    return openapi


def _takes(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> bool:
    if "$ref" in schema:
        return _takes(schemas[schema["$ref"].rpartition("/")[2]], schemas)
    if FIELD in schema.get("properties", {}):
        return True
    variants = (variant for kind in ("anyOf", "oneOf", "allOf") for variant in schema.get(kind, []))
    return any(_takes(variant, schemas) for variant in variants)
