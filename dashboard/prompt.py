"""The playground's data: a prompt of blocks, its answer, the tokens by class, the request as code.

Pure.
"""

import json
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, Literal

from dashboard.ui import formats
from dashboard.ui.charts import TOKENS, Row
from engine.protocol import TTLS as TTL_CLASSES
from engine.protocol import Ttl
from gateway.structs.usage import Turn

Kind = Literal["tool", "system", "user", "assistant"]
KINDS: tuple[Kind, ...] = ("tool", "system", "user", "assistant")
_MARKER_TTLS: tuple[Ttl, ...] = ("5m", "1h")
"""The TTLs that the Messages API takes (`AnthropicTtl` of the gateway)."""
TTLS: dict[str, Ttl | None] = {
    "No marker": None,
    **{TTL_CLASSES[ttl].words: ttl for ttl in _MARKER_TTLS},
}
MAX_BLOCKS = 40
KEY = "HOLDFAST_API_KEY"
CLASSES = tuple(TOKENS["light"])
DIALECTS = {
    "messages": "Anthropic Messages",
    "chat": "OpenAI Chat Completions",
    "completions": "OpenAI Completions",
    "responses": "OpenAI Responses",
    "gemini": "Google generateContent",
}
_PATHS = {
    "messages": "/v1/messages",
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
}
_CLOSE = 1.2
"""Two times that differ by less than this factor count as equal, since each is measured once."""


class NotBlocks(ValueError):
    """Blocks of text can't show the body, so it is sent as it is."""


@dataclass(frozen=True, slots=True)
class Block:
    """A block of a prompt."""

    kind: Kind
    # A text, or a tool's JSON.
    text: str
    # The TTL of the marker at its end. None: it has no marker.
    ttl: str | None = None

    @property
    def name(self) -> str:
        if self.kind != "tool":
            return self.kind.capitalize()
        try:
            return f"Tool {json.loads(self.text)['name']}"
        except (ValueError, KeyError, TypeError):
            return "Tool"


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of a model API."""

    # One of `DIALECTS`.
    dialect: str
    body: dict[str, Any]

    def path(self, model: str) -> str:
        """Where it is sent. Google's dialect has the model in the path."""
        return _PATHS.get(self.dialect, f"/v1beta/models/{model}:generateContent")

    def for_model(self, model: str) -> "ModelRequest":
        """The same request to another model, for an answer in one piece."""
        body = {name: value for name, value in self.body.items() if name != "stream"}
        if self.dialect != "gemini":
            body["model"] = model
        return ModelRequest(self.dialect, body)


def in_order(blocks: Sequence[Block]) -> list[Block]:
    """The blocks that have text, as the prompt has them: tools, system, then the messages."""
    ranks = {"tool": 0, "system": 1}
    filled = [block for block in blocks if block.text.strip()]
    return sorted(filled, key=lambda block: ranks.get(block.kind, 2))


def body_of(blocks: Sequence[Block], model: str, max_tokens: int) -> dict[str, Any]:
    """The body of a Messages request. Consecutive blocks of one role become one message.

    Raise ValueError for a tool that is no JSON object.
    """
    tools = []
    system = []
    messages: list[dict[str, Any]] = []
    for block in in_order(blocks):
        marker = {"cache_control": {"type": "ephemeral", "ttl": block.ttl}} if block.ttl else {}
        text = {"type": "text", "text": block.text, **marker}
        if block.kind == "tool":
            tools.append(_tool(block.text) | marker)
        elif block.kind == "system":
            system.append(text)
        elif messages and messages[-1]["role"] == block.kind:
            messages[-1]["content"].append(text)
        else:
            messages.append({"role": block.kind, "content": [text]})
    sections = {"tools": tools, "system": system}
    filled = {name: section for name, section in sections.items() if section}
    return {"model": model, "max_tokens": max_tokens, **filled, "messages": messages}


def _tool(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        raise ValueError("A tool is not valid JSON.") from None
    if not isinstance(value, dict):
        raise ValueError("A tool must be a JSON object with name, description and input_schema.")
    return value


def blocks_of(body: Mapping[str, Any]) -> list[Block]:
    """Take the body of a Messages request apart.

    Raise NotBlocks if it has more than text and tools, or more than `MAX_BLOCKS` blocks.
    """
    blocks: list[Block] = []
    for tool in body.get("tools") or []:
        plain = {name: value for name, value in tool.items() if name != "cache_control"}
        blocks.append(Block("tool", json.dumps(plain, indent=2), _ttl(tool)))
    sources: list[tuple[Kind, Any]] = [("system", body.get("system"))]
    for message in body.get("messages") or []:
        if message.get("role") not in ("user", "assistant"):
            raise NotBlocks(f"a message of the role {message.get('role')!r:.20}")
        sources.append((message["role"], message.get("content")))
    for kind, content in sources:
        texts = [{"type": "text", "text": content}] if isinstance(content, str) else content or []
        for item in texts:
            if item.get("type") != "text":
                raise NotBlocks("content other than text")
            blocks.append(Block(kind, str(item.get("text", "")), _ttl(item)))
    if len(blocks) > MAX_BLOCKS:
        raise NotBlocks(f"more than {MAX_BLOCKS} blocks")
    return blocks


def _ttl(item: Mapping[str, Any]) -> str | None:
    marker = item.get("cache_control")
    return str(marker.get("ttl", "5m")) if isinstance(marker, dict) else None


@dataclass(slots=True)
class Answer:
    """The part of an answer that has arrived so far."""

    text: str = ""
    id: str | None = None
    # The tokens up to each marker, as the engine counts them.
    ends: list[int | None] = field(default_factory=list)
    # Why the answer failed, in the gateway's words. None: it did not fail.
    problem: str | None = None


def follow(lines: Iterable[str], answer: Answer) -> Iterator[None]:
    """Read the events of a Messages stream into `answer`, one at a time."""
    for line in lines:
        if not line.startswith("data:"):
            continue
        event: Mapping[str, Any] = json.loads(line.removeprefix("data:"))
        match event.get("type"):
            case "message_start":
                answer.id = event["message"]["id"]
                reports = event["message"].get("holdfast", {}).get("breakpoints", [])
                answer.ends = [report.get("tokens") for report in reports]
            case "content_block_delta":
                answer.text += event["delta"].get("text", "")
            case "error":
                answer.problem = str(event.get("error", {}).get("message", "the stream broke off"))
        yield


def text_of(dialect: str, answer: Mapping[str, Any]) -> str:
    """The text of a whole answer. It is empty if the answer has none."""
    first = (answer.get("choices") or answer.get("candidates") or [{}])[0]
    match dialect:
        case "chat":
            return str((first.get("message") or {}).get("content") or "")
        case "completions":
            return str(first.get("text") or "")
        case "gemini":
            pieces = (first.get("content") or {}).get("parts") or []
        case _:
            items = [item for item in answer.get("output") or [] if item.get("type") == "message"]
            pieces = [part for item in items for part in item.get("content") or []]
    return "".join(str(part.get("text") or "") for part in pieces)


def counts_of(turn: Turn) -> dict[str, int]:
    """A prompt's tokens by class, in the prompt's order.

    The order is: read, written, reused automatically, computed. Longer TTLs are written first, as
    the contract asks.
    """
    writes = reversed(turn.writes.items())
    return {
        "Read from cache": turn.cache_read_tokens,
        **{f"Written, {TTL_CLASSES[ttl].words}": tokens for ttl, tokens in writes},
        "Reused automatically": turn.automatic_input_tokens,
        "Computed, not written": turn.computed_input_tokens,
    }


def prompt_spans(counts: Mapping[str, int]) -> list[Row]:
    """The prompt from its first token to its last, by class."""
    start = 0
    rows: list[Row] = []
    for name, tokens in counts.items():
        if tokens:
            rows.append({"class": name, "start": start, "end": start + tokens, "tokens": tokens})
            start += tokens
    return rows


def part_rows(
    blocks: Sequence[Block], counts: Mapping[str, int], ends: Sequence[int | None]
) -> list[dict[str, Any]]:
    """Each block of the prompt, with its tokens by class and where it ends.

    `ends` has the engine's count of tokens up to the end of each marked block. The blocks between
    two such ends are a group. Its tokens are divided between its blocks by length in characters. A
    row `is_exact` if its block is alone in its group. It `ends_exactly` if its block is the last of
    the group.
    """
    spans = prompt_spans(counts)
    marked = (number for number, block in enumerate(blocks) if block.ttl is not None)
    # The tokens up to a block's end, by the block's number.
    known_ends = {number: tokens for number, tokens in zip(marked, ends, strict=False) if tokens}
    known_ends[len(blocks) - 1] = sum(counts.values())
    rows: list[dict[str, Any]] = []
    num_grouped = 0
    start = 0
    for last in sorted(known_ends):
        group = blocks[num_grouped : last + 1]
        for block, end in zip(group, _divided(group, start, known_ends[last]), strict=True):
            rows.append(
                {
                    "part": block,
                    "tokens": end - start,
                    "end": end,
                    "is_exact": len(group) == 1,
                    "ends_exactly": block is group[-1],
                    **_overlaps(spans, start, end),
                }
            )
            start = end
        num_grouped = last + 1
    return rows


def _divided(group: Sequence[Block], start: int, end: int) -> list[int]:
    """Where each block of a group ends, if its tokens are divided by length in characters."""
    characters = max(sum(len(block.text) for block in group), 1)
    lengths = accumulate(len(block.text) for block in group)
    return [start + round((end - start) * length / characters) for length in lengths]


def _overlaps(spans: Sequence[Row], start: int, end: int) -> dict[str, int]:
    """The tokens of each class between two places of the prompt."""
    tokens = {span["class"]: min(end, span["end"]) - max(start, span["start"]) for span in spans}
    return {name: count for name, count in tokens.items() if count > 0}


def elsewhere_rows(parts: Sequence[Row]) -> list[Row]:
    """For each block, what a second send would read if the last marker stood at the block's end."""
    total = parts[-1]["end"] if parts else 0
    return [
        {
            "Marker at the end of": f"{number}. {row['part'].name}",
            "It reads": row["end"],
            "Of the prompt": row["end"] / total if total else None,
            "It computes": total - row["end"],
            "Known": "exactly" if row["ends_exactly"] else "about",
            "Marked now": row["part"].ttl or "no",
        }
        for number, row in enumerate(parts, 1)
    ]


def gained(first: Turn, second: Turn) -> str:
    """A sentence on the second send against the first: time to first token, tokens read, and cost.

    It is shown as Markdown, so it has no text of users.
    """
    first_seconds = first.first_token_seconds
    second_seconds = second.first_token_seconds
    times = f"{formats.seconds(first_seconds)} → {formats.seconds(second_seconds)}"
    if not first_seconds or not second_seconds:
        speed = "**The second send** has no time to first token."
    elif first_seconds / second_seconds >= _CLOSE:
        factor = first_seconds / second_seconds
        speed = f"**The second send answered {factor:.2g} times as soon**: {times}."
    elif second_seconds / first_seconds >= _CLOSE:
        speed = f"**The second send answered later**: {times}."
    else:
        speed = f"**Both sends answered about as soon**: {times}."
    cost = ""
    if first.cost_nano is not None and second.cost_nano is not None:
        second_cost = formats.dollars(second.cost_nano)
        first_cost = formats.dollars(first.cost_nano)
        cost = f" and cost {second_cost} instead of {first_cost}"
    return (
        f"{speed} It read {second.cache_read_tokens:,} of its {second.prompt_tokens:,} prompt"
        f" tokens{cost}."
    )


def curl(url: str, path: str, body: Mapping[str, Any]) -> str:
    """The request as a curl command. The command reads the key from a variable of the shell."""
    data = shlex.quote(json.dumps(body, indent=2, ensure_ascii=False))
    return (
        f'curl {shlex.quote(url + path)} \\\n  -H "x-api-key: ${KEY}" \\\n'
        '  -H "anthropic-version: 2023-06-01" -H "content-type: application/json" \\\n'
        f"  -d {data}"
    )


def python(url: str, path: str, body: Mapping[str, Any]) -> str:
    """The request as a Python program: with Anthropic's SDK for its own API, else with plain HTTP.

    The program reads the key from the environment.
    """
    if path == "/v1/messages":
        fields = "".join(f"    {name}={value!r},\n" for name, value in body.items())
        return (
            "import os\n\nfrom anthropic import Anthropic\n\n"
            f'client = Anthropic(base_url={url!r}, api_key=os.environ["{KEY}"])\n'
            f"answer = client.messages.create(\n{fields})\nprint(answer.usage)\n"
        )
    return (
        "import os\n\nimport httpx\n\n"
        f"body = {body!r}\n"
        f"answer = httpx.post(\n    {url + path!r},\n    json=body,\n"
        f'    headers={{"x-api-key": os.environ["{KEY}"]}},\n    timeout=600,\n)\n'
        "print(answer.json())\n"
    )
