"""Which server it is, and what it is tried with at the start: what it tells, whom it keeps apart,
what it holds to.

Nothing is taken from its version: a flag that was left out shows only in what it answers.
"""

from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

import msgspec
import structlog

from engine.backends.external import Order
from engine.backends.upstream.server import (
    Facts,
    Kind,
    ModelFacts,
    Piece,
    Server,
    UpstreamRefused,
)
from engine.backends.upstream.servers import MODELS, ChatServer, LlamaCppServer, Models, VllmServer
from engine.backends.upstream.slots import Slots, common_length
from engine.backends.upstream.wire import (
    UpstreamBusy,
    UpstreamDenied,
    UpstreamError,
    UpstreamGone,
    Wire,
)
from engine.cache.digests import pack
from engine.cache.ids import TokenId
from engine.protocol import (
    Capability,
    GenerateRequest,
    Message,
    Prompt,
    Sampling,
    TextPart,
    Tool,
    ToolChoice,
)
from engine.schedule.runner import SampleParams
from engine.settings import Settings
from engine.text.formats.turn_parser import TurnParser
from engine.text.renderer import ChatRenderer

log = structlog.get_logger()

SILENCE_SECONDS = 300.0
"""Seconds without a byte after which a request has failed."""
PROBE_TOKENS = 160
GRAMMAR_TOKENS = 256
_GREEDY = SampleParams(temperature=0.0, top_p=1.0, top_k=0, seed=0)
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["zq-blue", "zq-green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


_APART_BY = {
    "salt": "cache_salt, tried at the start",
    "slots": "a slot is one scope's; another's content in it is computed over, tried at the start",
    "none": "the server knows no scopes",
}


async def new_server(settings: Settings, files: ModelFacts) -> Server:
    """Raises UpstreamRefused where it can't be told what the server is, and UpstreamError."""
    key, kind = settings.upstream_key.get_secret_value(), settings.upstream_kind
    wire = Wire(settings.upstream, key, SILENCE_SECONDS)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(wire.close)
        found: Kind = await find_kind(wire) if kind == "auto" else kind
        closing.pop_all()
    if found == "llamacpp":
        return LlamaCppServer(wire, files, settings.block_size)
    return (VllmServer if found == "vllm" else ChatServer)(wire, files, settings.upstream_model)


async def find_kind(wire: Wire) -> Kind:
    """By whom `/v1/models` names as the owner, and by llama.cpp's own `/props`.

    Whatever else lists its models is a server of chat completions. Raises UpstreamRefused,
    UpstreamDenied, and UpstreamBusy where it is not ready yet.
    """
    status, answer = await wire.look(MODELS)
    owners = set[str]()
    if status == 200:
        try:
            models = msgspec.json.decode(answer, type=Models)
            owners = {model.owned_by.lower() for model in models.data}
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            pass
    if "vllm" in owners:
        return "vllm"
    props, _ = await wire.look("/props")
    if props == 200 or "llamacpp" in owners:
        return "llamacpp"
    if owners:
        return "openai"
    if {status, props} & {401, 403}:
        raise UpstreamDenied("the server wants a key: ENGINE_UPSTREAM_KEY")
    if 429 in (status, props) or max(status, props) >= 500:
        raise UpstreamBusy(f"the server is not ready: status {max(status, props)}")
    raise UpstreamRefused(
        "ENGINE_UPSTREAM_KIND: the server shows none of the kinds; name it: `openai` for any server"
        " of Chat Completions"
    )


async def examined(server: Server, renderer: ChatRenderer) -> Facts:
    """The facts with what only trying shows. Raises UpstreamError where the server fails."""
    facts = await _try_memory(server, await server.find_facts(), renderer)
    return await _try_grammars(server, facts, renderer) if facts.takes_grammars else facts


async def _try_memory(server: Server, facts: Facts, renderer: ChatRenderer) -> Facts:
    """Send one prompt twice in one scope; then in another, after something else.

    A cache behind the slots of llama.cpp shows only where a slot had other content meanwhile. The
    words are such that nobody has sent before, so that nothing can be reused at first. Each word of
    32 hexadecimal digits has several tokens, so there are blocks of them.
    """
    num_words = max(PROBE_TOKENS, 3 * (facts.block_size or 0)) // 12
    first, second = (
        _request(text=" ".join(uuid4().hex for _ in range(num_words))) for _ in range(2)
    )
    tokens = {id(one): _tokens(renderer, one) for one in (first, second)}
    own, other, slots = uuid4().hex, uuid4().hex, Slots(1)
    told = list[Piece]()
    for request, scope in ((first, own), (first, own), (second, other), (first, other)):
        async with slots.taken(scope, pack(tokens[id(request)])) as place:
            order = Order(
                order_id=uuid4().hex,
                scope=scope,
                token_ids=tokens[id(request)],
                request=request,
                sample=_GREEDY,
                max_tokens=1,
            )
            told.append(await server.prefill(order, place))
    again, foreign = told[1].cached_tokens, told[3].cached_tokens
    length = len(tokens[id(first)])
    if told[1].prompt_tokens not in (None, length):
        note = f"not told: it counts {told[1].prompt_tokens} tokens of a prompt of {length}"
        return replace(facts, tells="never", tells_note=note)
    if again is None or foreign is None:
        note = f"not told: {server.NOT_TOLD}"
        facts = replace(facts, tells="never", tells_note=note)
        return replace(facts, isolation="none", isolation_note=server.UNPROVEN)
    note = server.TOLD_BY
    if not again:
        note += "; it reused nothing of a prompt that was sent twice"
    facts = replace(facts, tells_note=note)
    # Prompts may begin alike by chance; a slot keeps that much of its scope's own.
    if foreign <= common_length(*(pack(tokens[id(one)]) for one in (first, second))):
        return replace(facts, isolation_note=_APART_BY[facts.isolation])
    if facts.kind == "llamacpp":
        raise UpstreamRefused("slots share a cache in host memory: start it with --cache-ram 0")
    note = f"a second scope reused {foreign} tokens of the first one's prompt"
    return replace(facts, isolation="none", isolation_note=note)


async def _try_grammars(server: Server, facts: Facts, renderer: ChatRenderer) -> Facts:
    """Bind an answer to a schema that no model writes by itself, and a call to one."""
    if not renderer.can_constrain:
        return replace(facts, forced_note="the grammar library can't use the tokenizer")
    try:
        is_kept = await _keeps_to(server, renderer, _request(output_schema=_SCHEMA))
    except (UpstreamGone, UpstreamBusy):
        raise
    except UpstreamError as error:
        log.info("the upstream server takes no grammar", why=str(error))
        hint = "start it with --structured-outputs-config.backend guidance"
        return replace(facts, forced_note=f"it took no grammar: {hint}")
    if not is_kept:
        return replace(facts, forced_note="it took a grammar and did not keep to it")
    found: set[Capability] = {"structured_output"}
    request = _request(tools=[Tool("paint", _SCHEMA)], choice=ToolChoice("tool", name="paint"))
    if renderer.tool_format is None:
        note = "the template has no tool calls that we know"
    elif await _keeps_to(server, renderer, request):
        found.add("forced_tools")
        note = "grammars, tried at the start"
    else:
        note = "it did not keep to a grammar of a call"
    return replace(facts, capabilities=facts.capabilities | found, forced_note=note)


async def _keeps_to(server: Server, renderer: ChatRenderer, request: GenerateRequest) -> bool:
    parser = renderer.parser(request)
    assert isinstance(parser, TurnParser)
    order = Order(
        order_id=request.request_id,
        scope=request.scope,
        token_ids=_tokens(renderer, request),
        request=request,
        sample=_GREEDY,
        max_tokens=GRAMMAR_TOKENS,
        end_token_ids=sorted(parser.end_token_ids),
        grammar=parser.grammar,
    )
    async with aclosing(server.generate(order)) as pieces:
        async for piece in pieces:
            for token in piece.token_ids:
                parser.feed(token)
                if parser.finish is not None:
                    return parser.finish != "failed"
    return parser.finish is not None and parser.finish != "failed"


def _tokens(renderer: ChatRenderer, request: GenerateRequest) -> list[TokenId]:
    return list(renderer.render(request.prompt, thinking=False).token_ids)


def _request(
    tools: list[Tool] | None = None,
    choice: ToolChoice | None = None,
    output_schema: dict[str, Any] | None = None,
    text: str = "Say hello.",
) -> GenerateRequest:
    return GenerateRequest(
        request_id=uuid4().hex,
        scope=uuid4().hex,
        prompt=Prompt([Message("user", [TextPart(text)])], tools or []),
        sampling=Sampling(max_tokens=GRAMMAR_TOKENS, temperature=0.0),
        tool_choice=choice or ToolChoice(),
        output_schema=output_schema,
    )
