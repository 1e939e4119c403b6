"""Which server it is, and how each kind is talked to."""

from contextlib import AsyncExitStack

import msgspec

from engine.backends.upstream.llamacpp_server import LlamaCppServer
from engine.backends.upstream.model import ModelFacts
from engine.backends.upstream.openai_server import OpenAiServer
from engine.backends.upstream.server import (
    Kind,
    Server,
    UpstreamBusy,
    UpstreamDenied,
    UpstreamRefused,
)
from engine.backends.upstream.vllm_server import VllmServer
from engine.backends.upstream.wire import Wire
from engine.settings import Settings
from engine.text.renderer import ChatRenderer

SILENCE_SECONDS = 300.0
"""Seconds without a byte after which a request has failed."""


class _Owned(msgspec.Struct):
    owned_by: str = ""


class _Models(msgspec.Struct):
    data: list[_Owned] = []


async def new_server(settings: Settings, model: ModelFacts, renderer: ChatRenderer) -> Server:
    """Raises UpstreamRefused where it can't be told what the server is, and UpstreamError."""
    wire = Wire(
        settings.upstream,
        settings.upstream_key.get_secret_value(),
        SILENCE_SECONDS,
    )
    kind = settings.upstream_kind
    async with AsyncExitStack() as closing:
        closing.push_async_callback(wire.close)
        found: Kind = await find_kind(wire) if kind == "auto" else kind
        closing.pop_all()
    match found:
        case "vllm":
            return VllmServer(wire, settings.upstream_model, model)
        case "llamacpp":
            return LlamaCppServer(wire, model, settings.block_size)
        case _:
            # The others have chat completions too, and nothing more of theirs was tried here.
            return OpenAiServer(wire, settings.upstream_model, model, found)


async def find_kind(wire: Wire) -> Kind:
    """By what each kind alone answers. `/v1/models` names the owner on vLLM and llama.cpp.

    Raises UpstreamRefused, UpstreamDenied, and UpstreamBusy where it is not ready yet.
    """
    status, answer = await wire.get("/v1/models")
    if status == 200:
        try:
            models = msgspec.json.decode(answer, type=_Models)
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            models = _Models()
        owners = {model.owned_by.lower() for model in models.data}
        for owner, kind in _OWNERS.items():
            if owner in owners:
                return kind
    statuses = {status}
    for path, kind in _PATHS.items():
        status, _ = await wire.get(path)
        if status == 200:
            return kind
        statuses.add(status)
    if statuses & {401, 403}:
        raise UpstreamDenied("the server wants a key: ENGINE_UPSTREAM_KEY")
    if 429 in statuses or max(statuses) >= 500:
        raise UpstreamBusy(f"the server is not ready: status {max(statuses)}")
    raise UpstreamRefused(
        "ENGINE_UPSTREAM_KIND: the server shows none of the kinds; name it: `openai` for any server"
        " of Chat Completions"
    )


_OWNERS: dict[str, Kind] = {
    "vllm": "vllm",
    "llamacpp": "llamacpp",
    "sglang": "sglang",
    "tensorrt_llm": "trtllm",
}
_PATHS: dict[str, Kind] = {"/props": "llamacpp", "/get_model_info": "sglang", "/info": "tgi"}
