"""How a conversation's calls, results and thinking are handed to a chat template.

Templates agree on OpenAI's messages in outline only. What one takes is found out when a model is
loaded: by `engine.text.formats.proof` for calls, by `engine.text.template.traits` for the rest.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

ThinkingKey = Literal["reasoning_content", "thinking", "reasoning"]


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenCalls:
    """The texts around calls that are written into a turn's content.

    `before` has the place `{name}`; the input's JSON follows it.
    """

    begin: str
    before: str
    behind: str
    separator: str
    end: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """What a template wants of a turn with calls.

    - `string_arguments`: the input as a string of JSON (DeepSeek), not as an object;
    - `null_content`: no content where the turn has no text (DeepSeek V3 drops calls beside any);
    - `names_ids`: ids of the form `functions.NAME:INDEX`, the only place of the name (Kimi K2);
    - `splits_text`: the turn's text as a message of its own before the calls';
    - `interleaves`: each result right behind its call (gpt-oss names a result by the last call);
    - `thinking_key`: the field of a message that thinking stands in;
    - `merges_text`: text beside thinking and calls is part of the thinking (gpt-oss refuses both);
    - `written`: calls written into the content, for templates that render none (Granite 3.3);
    - `told`: how to write a call, for templates that render calls and no tools (DeepSeek): the
      tools then stand at the beginning of the system prompt, with this behind them.
    """

    string_arguments: bool = False
    null_content: bool = False
    names_ids: bool = False
    splits_text: bool = False
    interleaves: bool = False
    thinking_key: ThinkingKey = "reasoning_content"
    merges_text: bool = False
    written: WrittenCalls | None = None
    told: str = ""


def interleaved(messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Messages with one call each, every result moved behind the message of its call."""
    callers = {m["tool_calls"][0]["id"] for m in messages if len(m.get("tool_calls", ())) == 1}
    results: dict[str, dict[str, Any]] = {}
    for message in messages:
        if message["role"] == "tool" and message["tool_call_id"] in callers:
            results.setdefault(message["tool_call_id"], message)
    moved = {id(message) for message in results.values()}
    ordered: list[dict[str, Any]] = []
    for message in messages:
        if id(message) in moved:
            continue
        ordered.append(message)
        for call in message.get("tool_calls", ()):
            result = results.pop(call["id"], None)
            if result is not None:
                ordered.append(result)
    return ordered
