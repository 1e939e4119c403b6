"""How commands ask a running gateway, and how they describe engines that they asked."""

import argparse
import asyncio
from collections.abc import Mapping
from typing import TypeVar

import aiohttp
import msgspec

from gateway.base.settings import load
from gateway.cli.arguments import CommandError
from gateway.routing.engine import Engine

_SECONDS = 10.0
PATIENT_SECONDS = 120.0
Answer = TypeVar("Answer")


class NotAnswered(CommandError):
    """No gateway of this version answers, or the gateway refuses."""


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error


def add_url(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", help="a gateway's; default: this machine's, on HOLDFAST_PORT")


def url_of(options: argparse.Namespace) -> str:
    url: str = options.url or f"http://127.0.0.1:{load().port}"
    return url.rstrip("/")


def why_not_ready(engine: Engine) -> str:
    """Why an engine that a command asked itself is not ready."""
    return str(engine.readiness.get("error") or engine.readiness.get("stage") or "no answer")


def ask(
    url: str,
    path: str,
    kind: type[Answer],
    query: Mapping[str, str] | None = None,
    key: str | None = None,
    *,
    body: Mapping[str, str] | None = None,
    seconds: float = _SECONDS,
) -> Answer:
    """Send a GET, or a POST if there is a body, and decode the answer.

    Raise NotAnswered where no gateway gives such an answer, or with the message of its refusal.
    """
    try:
        headers = {"x-api-key": key} if key else {}
        reply = asyncio.run(_send(f"{url}{path}", query or {}, headers, body, seconds))
        try:
            refusal = msgspec.json.decode(reply, type=_Refusal)
        except msgspec.ValidationError:
            return msgspec.json.decode(reply, type=kind)
    except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
        raise NotAnswered(f"no gateway of this version answers at {url}: {error!r}") from None
    raise NotAnswered(f"the gateway at {url} refuses: {refusal.error.message}")


async def _send(
    url: str,
    query: Mapping[str, str],
    headers: Mapping[str, str],
    body: Mapping[str, str] | None,
    seconds: float,
) -> bytes:
    """The body of an answer of any status. A gateway that is not ready answers with its conditions,
    too."""
    timeout = aiohttp.ClientTimeout(total=seconds)
    method = "GET" if body is None else "POST"
    async with aiohttp.ClientSession(timeout=timeout) as http:
        async with http.request(method, url, params=query, headers=headers, json=body) as response:
            return await response.read()
