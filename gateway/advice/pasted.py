"""Advice on a pasted request: JSON of any dialect, or a curl command. Pure.

The dialect's own decoder reads the request. So a request that is refused here would be refused by
the model APIs, too.
Token counts are estimated from bytes.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

import msgspec

from engine.protocol import InputUsage, TextPart
from gateway.advice.observation import Observation, Row, observe
from gateway.base.catalogue import CatalogueModel
from gateway.base.errors import InvalidRequest
from gateway.base.grants import AutoCache
from gateway.dialects.anthropic.decode import decode_messages
from gateway.dialects.anthropic.lower import plan_of
from gateway.dialects.gemini import lower as gemini
from gateway.dialects.gemini.request import decode_generate
from gateway.dialects.lowering import RequestContext
from gateway.dialects.openai.lower import chat_ask_of, completion_ask_of
from gateway.dialects.openai.request import decode_chat, decode_completion
from gateway.dialects.responses.lower import prepare
from gateway.dialects.responses.request import decode_responses
from gateway.prices.price import TokenPrices
from gateway.prompt.ask import Principal
from gateway.prompt.media import num_placeholders
from gateway.prompt.plan import Plan
from gateway.prompt.slots import MarkersBroken
from gateway.structs.advice import Block, Finding, RequestAdvice, StreamAdvice

PastedDialect = Literal["messages", "chat", "completions", "responses", "gemini"]
DIALECTS: tuple[PastedDialect, ...] = get_args(PastedDialect)
MAX_REQUESTS = 20
MAX_CHARACTERS = 1_000_000
MAX_DEPTH = 500
SCOPE = "pasted"
_BYTES_PER_TOKEN = 4
_PATHS: dict[str, PastedDialect] = {
    "/chat/completions": "chat",
    "/completions": "completions",
    "/responses": "responses",
    "/messages": "messages",
}
_FIELDS: dict[str, PastedDialect] = {
    "contents": "gemini",
    "input": "responses",
    "prompt": "completions",
}
_DATA = ("-d", "--data", "--data-raw", "--data-binary", "--data-ascii", "--json")
_OF_TOOLS = ("input_schema", "parameters", "arguments")
_MARKERS = ("cache_control", "prompt_cache_breakpoint")
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
_SUSPECTS = {
    "an id": re.compile(
        r"\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\b|\b[0-9a-f]{16,64}\b",
        re.IGNORECASE,
    ),
    "a time": re.compile(r"\b\d{1,2}:\d{2}:\d{2}\b|\b1[5-9]\d{8}(?:\d{3})?\b"),
    "a date": re.compile(
        rf"\b20\d\d-[01]\d-[0-3]\d\b|\b(?:{_MONTHS}) \d{{1,2}},? 20\d\d\b"
        rf"|\b\d{{1,2}} (?:{_MONTHS}) 20\d\d\b"
    ),
}
# A part of a shell's word, or white space, which ends a word. A part is in single quotes, in double
# quotes, or unquoted.
_SHELL_PART = re.compile(
    r"'(?P<plain>[^']*)'"
    r'|"(?P<quoted>(?:[^"\\]++|\\.)*+)"'
    r"|(?P<bare>(?:[^\s'\"\\]++|\\.)++)"
    r"|(?P<end>\s++)",
    re.DOTALL,
)
# A backslash with what it escapes. In double quotes a backslash before any other character stands
# for itself.
_ESCAPES = {
    "bare": re.compile(r"\\(.)", re.DOTALL),
    "quoted": re.compile(r'\\(["\\])'),
}
_SEARCHED_CHARACTERS = 65_536
_MAX_SUSPECTS = 10
_MAX_BLOCKS = 200


@dataclass(frozen=True, slots=True)
class Pasted:
    """One pasted request."""

    dialect: PastedDialect
    body: dict[str, Any]
    # The request's plan. If the markers break a rule, it is the plan without them.
    plan: Plan
    # The message about the rule that the markers break; None where they break none.
    broken: str | None = None


def read(source: Any, dialect: PastedDialect | None = None) -> Pasted:
    """Read a request from a text or a JSON object. Without `dialect` the curl command's URL decides
    the dialect, or else the body's fields. Raise InvalidRequest for what can't be read."""
    url = ""
    if isinstance(source, str):
        if len(source) > MAX_CHARACTERS:
            raise InvalidRequest(f"more than {MAX_CHARACTERS:,} characters")
        text = source.strip()
        if text.startswith("curl"):
            text, url = _of_curl(text)
        try:
            body = json.loads(text)
        except (ValueError, RecursionError):
            raise InvalidRequest("neither a JSON object nor a curl command with one") from None
    else:
        body = source
    if not isinstance(body, dict):
        raise InvalidRequest("the JSON is no object")
    if body is source and len(_bytes(body)) > MAX_CHARACTERS:
        raise InvalidRequest(f"more than {MAX_CHARACTERS:,} bytes")
    dialect_there = dialect or _by_url(url) or _by_fields(body)
    try:
        return Pasted(dialect_there, body, _plan_of(dialect_there, body))
    except MarkersBroken as error:
        return Pasted(dialect_there, body, _plan_of(dialect_there, _unmarked(body)), str(error))


def observation_of(
    pasted: Pasted, number: int, at_ms: int, rates: TokenPrices | None
) -> Observation:
    """The request as a turn that was sent at `at_ms`, with tokens estimated from bytes. Raise
    InvalidRequest where it has no content."""
    plan = pasted.plan
    model = str(pasted.body.get("model", ""))
    printed = plan.fingerprint(model, b"", 0, (), is_shared=True)
    total = plan.num_bytes // _BYTES_PER_TOKEN
    row = Row(
        id=f"requests[{number}]",
        at_ms=at_ms,
        workspace="",
        key="",
        model=model,
        dialect="anthropic" if pasted.dialect == "messages" else pasted.dialect,
        usage=InputUsage(input_tokens=total, computed_tokens=total),
        begun_ms=at_ms,
        rates=rates,
    )
    observation = observe(row, printed)
    if observation is None:
        raise InvalidRequest("the request has no content")
    return observation


def marked(pasted: Pasted, places: Mapping[int, str]) -> dict[str, Any] | None:
    """The body with markers at these segments alone. `places` has the TTL of each by segment.

    None where the dialect has no markers, or where a segment has no place for one.
    """
    if pasted.dialect not in ("messages", "chat"):
        return None
    body: dict[str, Any] = _unmarked(pasted.body)
    for segment, ttl in places.items():
        if not _mark(body, pasted.plan.slots[segment].path, ttl):
            return None
    return body


def as_messages(pasted: Pasted) -> dict[str, Any] | None:
    """The request's content as a body of the Messages API. None where it has more than texts and
    tools. A request in that dialect keeps its markers, and others lose them."""
    if pasted.dialect == "messages":
        return pasted.body
    prompt = pasted.plan.prompt
    messages: list[dict[str, Any]] = []
    if prompt.text is not None:
        messages.append({"role": "user", "content": prompt.text})
    for message in prompt.messages:
        texts = [part.text for part in message.parts if isinstance(part, TextPart)]
        if len(texts) < len(message.parts):
            return None
        content = [{"type": "text", "text": text} for text in texts]
        messages.append({"role": message.role, "content": content})
    return {
        "tools": [
            {
                "name": tool.name,
                "description": tool.description or "",
                "input_schema": tool.input_schema,
            }
            for tool in prompt.tools
        ],
        "system": [{"type": "text", "text": block.text} for block in prompt.system],
        "messages": messages,
    }


def _mark(body: dict[str, Any], path: str, ttl: str) -> bool:
    steps: list[str | int] = [
        int(step) if step.isdigit() else step for step in re.findall(r"\w+", path)
    ]
    holder: Any = body
    for number, step in enumerate(steps):
        is_place = isinstance(holder, list) and isinstance(step, int) and step < len(holder)
        is_field = isinstance(holder, dict) and step in holder
        value = holder[step] if is_place or is_field else None
        if isinstance(value, str) and step in ("system", "content"):
            value = [{"type": "text", "text": value}]
            holder[step] = value
            if number == len(steps) - 1:
                holder = value[0]
                break
        holder = value
    if isinstance(holder, list):
        holder = holder[-1] if holder else None
    if not isinstance(holder, dict):
        return False
    holder["cache_control"] = {"type": "ephemeral", "ttl": ttl}
    return True


def shell_words(text: str) -> list[str]:
    """Split a text as `shlex.split` does, in time linear in the text. (`shlex` copies a whole word
    for each of its characters.) Raise InvalidRequest where quotes do not match."""
    words: list[list[str]] = []
    at = 0
    is_open = False
    while at < len(text):
        part = _SHELL_PART.match(text, at)
        if part is None:
            raise InvalidRequest("the curl command can't be read: the quotes do not match")
        at = part.end()
        kind = part.lastgroup or ""
        if kind != "end":
            if not is_open:
                words.append([])
            escape = _ESCAPES.get(kind)
            words[-1].append(part[kind] if escape is None else escape.sub(r"\1", part[kind]))
        is_open = kind != "end"
    return ["".join(parts) for parts in words]


def _of_curl(text: str) -> tuple[str, str]:
    """The data and the URL of a command. Raise InvalidRequest where the data is in a file."""
    words = shell_words(text.replace("\\\r\n", " ").replace("\\\n", " "))
    data = ""
    url = ""
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, equals, value = word.partition("=")
        if word in _DATA:
            data = following
        elif name in _DATA and equals:
            data = value
        elif word.startswith(("http://", "https://")):
            url = word
    if data.startswith("@"):
        raise InvalidRequest("the command reads its body from a file: paste the file's content")
    return data, url


def _by_url(url: str) -> PastedDialect | None:
    try:
        path = urlsplit(url).path
    except ValueError:  # a host in brackets that do not match
        return None
    if "generateContent" in path:
        return "gemini"
    return next((dialect for end, dialect in _PATHS.items() if path.endswith(end)), None)


def _by_fields(body: dict[str, Any]) -> PastedDialect:
    for field, dialect in _FIELDS.items():
        if field in body:
            return dialect
    messages = body.get("messages")
    tools = body.get("tools")
    listed = messages if isinstance(messages, list) else []
    values = (message.get("role") for message in listed if isinstance(message, dict))
    roles = {role for role in values if isinstance(role, str)}
    has_functions = isinstance(tools, list) and any(
        isinstance(tool, dict) and tool.get("type") == "function" for tool in tools
    )
    is_chat = roles & {"system", "developer", "tool"} and "system" not in body
    return "chat" if is_chat or has_functions or "max_completion_tokens" in body else "messages"


def _plan_of(dialect: PastedDialect, body: dict[str, Any]) -> Plan:
    name = body.get("model")
    filled = body if isinstance(name, str) else {**body, "model": "any"}
    model = CatalogueModel(id=str(filled["model"]), display_name="")
    who = Principal(SCOPE, SCOPE, SCOPE, auto_cache=AutoCache("off"))
    context = RequestContext(who, model, 0.0)
    match dialect:
        case "messages":
            filled = {"max_tokens": 1, **filled}
            return plan_of(decode_messages(_bytes(filled)), context)
        case "chat":
            return chat_ask_of(decode_chat(_bytes(filled)), context).plan
        case "completions":
            return completion_ask_of(decode_completion(_bytes(filled)), context).plan
        case "responses":
            return prepare(decode_responses(_bytes(filled)), context).ask.plan
        case "gemini":
            bare = {field: value for field, value in filled.items() if field != "model"}
            request = decode_generate(_bytes(bare), model.id)
            return gemini.ask_of(request, context, stream=False).plan


def _bytes(body: dict[str, Any]) -> bytes:
    try:
        return msgspec.json.encode(body)
    except (ValueError, TypeError, RecursionError, OverflowError):
        raise InvalidRequest("the JSON can't be read") from None


def _unmarked(value: Any, depth: int = 0) -> Any:
    """A copy without markers. Schemas and inputs of tools are kept as they are: a field there may
    have a marker's name."""
    if depth > MAX_DEPTH:
        raise InvalidRequest("the JSON is nested too deeply")
    if isinstance(value, dict):
        return {
            name: item if name in _OF_TOOLS else _unmarked(item, depth + 1)
            for name, item in value.items()
            if name not in _MARKERS
        }
    if isinstance(value, list):
        return [_unmarked(item, depth + 1) for item in value]
    return value


# Advice on one request, from its structure and its text.


def advise_request(pasted: Pasted, turn: Observation, min_tokens: int) -> RequestAdvice:
    """Advice on one request. `turn` is its observation; engines hold no prefix shorter than
    `min_tokens`."""
    ttls = dict(turn.marks)
    slots = pasted.plan.slots
    before = [0, *turn.tokens]
    blocks = [
        Block(
            path=slots[segment].path,
            tokens=turn.tokens[place] - before[place],
            marker=ttls.get(place),
        )
        for place, segment in enumerate(turn.places[:_MAX_BLOCKS])
    ]
    end = turn.carrier(turn.prefix_at(turn.head - 1)) if turn.head else -1
    places: dict[int, str] = {}
    if end >= 0 and turn.tokens[end] >= min_tokens:
        places[turn.places[end]] = "5m"
    last = turn.carrier(len(turn.places) - 1)
    if turn.answer >= 0 and turn.tokens[last] >= min_tokens:
        places[turn.places[last]] = "5m"
    findings = _marker_findings(pasted, turn, min_tokens)
    if not turn.marks and places:
        findings.append(_unmarked_finding(pasted, turn, end if end >= 0 else last))
    findings += _suspects(pasted, turn, min_tokens)
    return RequestAdvice(
        dialect=pasted.dialect,
        tokens=turn.total,
        blocks=blocks,
        findings=findings,
        marked=marked(pasted, places) if places else None,
        body=pasted.body,
        as_messages=as_messages(pasted),
        num_images=num_placeholders(pasted.plan.prompt),
    )


def _marker_findings(pasted: Pasted, turn: Observation, min_tokens: int) -> list[Finding]:
    """Findings on markers that break a rule, or that mark too short a prefix."""
    findings = []
    if pasted.broken is not None:
        findings.append(
            Finding(
                kind="invalid",
                path="cache_control",
                text=pasted.broken,
                change="Mark four blocks at most, those with the longer TTL first.",
                tokens=0,
                multiples=0.0,
            )
        )
    slots = pasted.plan.slots
    findings += [
        Finding(
            kind="too_short",
            path=slots[turn.places[place]].path,
            text=f"The prefix up to this marker has about {turn.tokens[place]:,} tokens. The"
            f" shortest that is held has {min_tokens:,}.",
            change="Mark a longer prefix, or leave the marker out.",
            tokens=turn.tokens[place],
            multiples=0.0,
        )
        for place, _ in turn.marks
        if turn.tokens[place] < min_tokens
    ]
    return findings


def _unmarked_finding(pasted: Pasted, turn: Observation, place: int) -> Finding:
    """The finding on a request without markers. The prefix at `place` is the one to mark."""
    tokens = turn.tokens[place]
    return Finding(
        kind="unmarked",
        path=pasted.plan.slots[turn.places[place]].path,
        text=f"Nothing is marked. About {tokens:,} tokens up to this block could be held:"
        " each request that begins with them again within the TTL saves the price of"
        f" {tokens * 0.9:,.0f} input tokens, and the write costs that of"
        f" {tokens * 0.25:,.0f} once.",
        change="Mark this block.",
        tokens=tokens,
        multiples=round(tokens * 0.65, 1),
    )


def with_own_paths(advice: StreamAdvice, requests: Sequence[Pasted]) -> StreamAdvice:
    """The advice with each finding's path as the request's own dialect spells it. `requests` has
    all pasted requests, in order."""
    findings = []
    for finding in advice.findings:
        section, _, index = finding.path.partition(".")
        if index and finding.turns:
            plan = requests[int(finding.turns[0][len("requests[") : -1])].plan
            start = {"tools": 0, "system": len(plan.prompt.tools)}.get(
                section, len(plan.prompt.tools) + len(plan.prompt.system)
            )
            path = plan.slots[start + int(index)].path
            finding = msgspec.structs.replace(finding, path=path)
        findings.append(finding)
    return msgspec.structs.replace(advice, findings=findings)


def _suspects(pasted: Pasted, turn: Observation, min_tokens: int) -> Iterator[Finding]:
    """Findings on texts that look as if they changed from request to request.

    The texts of tools and of system blocks are searched. The first message is searched, too, if
    other messages follow it.
    """
    count = 0
    prompt = pasted.plan.prompt
    first = prompt.messages[0].parts if len(prompt.messages) > 1 else ()
    texts = [(index, tool.description or "") for index, tool in enumerate(prompt.tools)]
    texts += [(turn.num_tools + index, block.text) for index, block in enumerate(prompt.system)]
    texts += [
        (turn.head + index, part.text)
        for index, part in enumerate(first)
        if isinstance(part, TextPart)
    ]
    for segment, text in texts:
        place = turn.prefix_at(segment)
        if place < 0:
            continue
        before = turn.tokens[place - 1] if place else 0
        size = turn.tokens[place] - before
        for what, pattern in _SUSPECTS.items():
            match = pattern.search(text[:_SEARCHED_CHARACTERS])
            if match is None:
                continue
            length = min(len(text), _SEARCHED_CHARACTERS)
            at = before + round(size * match.start() / length)
            lost = turn.tokens[-1] - at
            if lost < min_tokens or count >= _MAX_SUSPECTS:
                continue
            count += 1
            yield Finding(
                kind="suspect",
                path=pasted.plan.slots[segment].path,
                text=f"At character {match.start():,} stands what looks like {what}. If it changes"
                f" from request to request, none of the {lost:,} tokens from there on can be read.",
                change="Put it into the last user message.",
                tokens=lost,
                multiples=round(lost * 0.9, 1),
            )
            break
