"""Prompts that differ from one right behind one segment, for comparing renders."""

from engine.protocol import (
    Message,
    Part,
    Prompt,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)


def vary(prompt: Prompt, segment: int, mark: str) -> Prompt:
    """Text grows by the mark, an input by a key, a tool loses the tools after it or gains one."""
    tools, system = list(prompt.tools), list(prompt.system)
    messages = [Message(message.role, list(message.parts)) for message in prompt.messages]
    if segment < len(tools):
        is_last = segment == len(tools) - 1
        dummy = Tool(mark, {"type": "object", "properties": {}}, mark)
        return Prompt(messages, [*tools, dummy] if is_last else tools[: segment + 1], system)
    segment -= len(tools)
    if segment < len(system):
        system[segment] = TextPart(system[segment].text.rstrip() + mark)
        return Prompt(messages, tools, system)
    segment -= len(system)
    for message in messages:
        if segment < len(message.parts):
            message.parts[segment] = _vary_part(message.parts[segment], mark)
            break
        segment -= len(message.parts)
    return Prompt(messages, tools, system)


def _vary_part(part: Part, mark: str) -> Part:
    match part:
        case TextPart():
            return TextPart(part.text.rstrip() + mark)
        case ThinkingPart():
            return ThinkingPart(part.text.rstrip() + mark)
        case ToolUsePart():
            return ToolUsePart(part.id, part.name, {**part.input, mark: mark})
        case ToolResultPart():
            return ToolResultPart(part.tool_use_id, part.text.rstrip() + mark, part.is_error)
