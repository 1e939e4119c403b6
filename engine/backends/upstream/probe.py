"""What a server is tried with at the start: what it tells, whom it keeps apart, what it holds to.

Nothing is taken from its version: a flag that was left out shows only in what it answers.
"""

from contextlib import aclosing
from dataclasses import replace
from typing import Any
from uuid import uuid4

import structlog

from engine.backends.upstream.gate import Slots, common_length
from engine.backends.upstream.server import (
    Facts,
    Order,
    Piece,
    Server,
    UpstreamBusy,
    UpstreamError,
    UpstreamGone,
    UpstreamRefused,
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
from engine.text.formats.turn_parser import TurnParser
from engine.text.renderer import ChatRenderer

log = structlog.get_logger()

PROBE_TOKENS = 160
GRAMMAR_TOKENS = 256
_GREEDY = SampleParams(temperature=0.0, top_p=1.0, top_k=0, seed=0)
_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["zq-blue", "zq-green"]}},
    "required": ["colour"],
    "additionalProperties": False,
}


async def examined(server: Server, facts: Facts, renderer: ChatRenderer) -> Facts:
    """The facts with what only trying shows. Raises UpstreamError where the server fails."""
    facts = await _try_memory(server, facts, renderer)
    return await _try_grammars(server, facts, renderer)


async def _try_memory(server: Server, facts: Facts, renderer: ChatRenderer) -> Facts:
    """Send one prompt twice in one scope; then in another, after something else.

    A cache behind the slots of llama.cpp shows only where a slot had other content meanwhile.
    """
    prompt, else_prompt = _random_prompt(facts), _random_prompt(facts)
    own, other, slots = uuid4().hex, uuid4().hex, Slots(1)
    asked = ((prompt, own), (prompt, own), (else_prompt, other), (prompt, other))
    told = [await _asked(server, slots, renderer, one, scope) for one, scope in asked]
    again, foreign = told[1].cached_tokens, told[3].cached_tokens
    lengths = [len(_tokens(renderer, one)) for one in (prompt, else_prompt)]
    if told[1].prompt_tokens not in (None, lengths[0]):
        note = f"not told: it counts {told[1].prompt_tokens} tokens of a prompt of {lengths[0]}"
        return replace(facts, tells="never", tells_note=note)
    if again is None or foreign is None:
        return replace(
            facts,
            tells="never",
            tells_note=f"not told: {_NOT_TOLD.get(facts.kind, 'its answers do not say')}",
            isolation="none",
            isolation_note=_UNPROVEN.get(facts.kind, "the server knows no scopes"),
        )
    tells_note = _TOLD_BY[facts.kind]
    if not again:
        tells_note += "; it reused nothing of a prompt that was sent twice"
    # Prompts may begin alike by chance; a slot keeps that much of its scope's own.
    if foreign <= common_length(*(pack(_tokens(renderer, one)) for one in (prompt, else_prompt))):
        return replace(facts, tells_note=tells_note, isolation_note=_APART_BY[facts.isolation])
    if facts.kind == "llamacpp":
        raise UpstreamRefused("slots share a cache in host memory: start it with --cache-ram 0")
    note = f"a second scope reused {foreign} tokens of the first one's prompt"
    return replace(facts, tells_note=tells_note, isolation="none", isolation_note=note)


_TOLD_BY = {
    "vllm": "usage.prompt_tokens_details.cached_tokens",
    "llamacpp": "timings.cache_n",
    "sglang": "usage.prompt_tokens_details.cached_tokens",
    "trtllm": "usage.prompt_tokens_details.cached_tokens",
    "openai": "usage.prompt_tokens_details.cached_tokens",
    "tgi": "",
}
_NOT_TOLD = {
    "vllm": "start the server with --enable-prompt-tokens-details",
    "openai": "its usage has no prompt_tokens_details.cached_tokens",
    "sglang": "start the server with --enable-cache-report",
    "trtllm": "its usage has no prompt_tokens_details.cached_tokens",
    "tgi": "no field of its answers has it",
}
_UNPROVEN = {
    "vllm": "cache_salt is sent, and nothing shows whether the server heeds it",
}
_APART_BY = {
    "salt": "cache_salt, tried at the start",
    "slots": "a slot is one scope's; another's content in it is computed over, tried at the start",
    "none": "the server knows no scopes",
}


async def _asked(
    server: Server, slots: Slots, renderer: ChatRenderer, request: GenerateRequest, scope: str
) -> Piece:
    tokens = _tokens(renderer, request)
    place = slots.take(scope, pack(tokens))
    assert place is not None
    piece = await server.prefill(
        Order(
            order_id=uuid4().hex,
            scope=scope,
            token_ids=tokens,
            request=request,
            sample=_GREEDY,
            is_seeded=False,
            max_tokens=1,
            end_token_ids=[],
            slot=place.slot,
            may_reuse=place.may_reuse,
        )
    )
    slots.give_back(place)
    return piece


def _random_prompt(facts: Facts) -> GenerateRequest:
    """Words that nobody has sent before, so that nothing can be reused at first.

    Each word of 32 hexadecimal digits has several tokens, so there are blocks of them.
    """
    length = max(PROBE_TOKENS, 3 * (facts.block_size or 0))
    return _request(text=" ".join(uuid4().hex for _ in range(length // 12)))


def _tokens(renderer: ChatRenderer, request: GenerateRequest) -> list[TokenId]:
    return list(renderer.render(request.prompt, thinking=False).token_ids)


async def _try_grammars(server: Server, facts: Facts, renderer: ChatRenderer) -> Facts:
    """Bind an answer to a schema that no model writes by itself."""
    if not facts.takes_grammars:
        return facts
    if not renderer.can_constrain:
        return replace(facts, forced_note="the grammar library can't use the tokenizer")
    try:
        is_kept = await _keeps_to(server, renderer, _request(output_schema=_SCHEMA))
    except (UpstreamGone, UpstreamBusy):
        raise
    except UpstreamError as error:
        log.info("the upstream server takes no grammar", why=str(error))
        return replace(
            facts, forced_note=f"it took no grammar; {_GRAMMAR_HINT.get(facts.kind, '')}"
        )
    if not is_kept:
        return replace(facts, forced_note="it took a grammar and did not keep to it")
    found: set[Capability] = {"structured_output"}
    note = "grammars, tried at the start"
    if renderer.tool_format is not None:
        tool = Tool("paint", _SCHEMA)
        request = _request(tools=[tool], choice=ToolChoice(mode="tool", name="paint"))
        if await _keeps_to(server, renderer, request):
            found.add("forced_tools")
        else:
            note = "it did not keep to a grammar of a call"
    else:
        note = "the template has no tool calls that we know"
    return replace(facts, capabilities=facts.capabilities | found, forced_note=note)


_GRAMMAR_HINT = {
    "vllm": "it took no grammar: start it with --structured-outputs-config.backend guidance",
}


async def _keeps_to(server: Server, renderer: ChatRenderer, request: GenerateRequest) -> bool:
    parser = renderer.parser(request)
    assert isinstance(parser, TurnParser)
    rendered = renderer.render(request.prompt, thinking=False)
    order = Order(
        order_id=request.request_id,
        scope=request.scope,
        token_ids=rendered.token_ids,
        request=request,
        sample=_GREEDY,
        is_seeded=False,
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


def _request(
    tools: list[Tool] | None = None,
    choice: ToolChoice | None = None,
    output_schema: dict[str, Any] | None = None,
    text: str = "Say hello.",
) -> GenerateRequest:
    messages = [Message("user", [TextPart(text)])]
    return GenerateRequest(
        request_id=uuid4().hex,
        scope=uuid4().hex,
        prompt=Prompt(messages, tools or []),
        sampling=Sampling(max_tokens=GRAMMAR_TOKENS, temperature=0.0),
        tool_choice=choice or ToolChoice(),
        output_schema=output_schema,
    )
