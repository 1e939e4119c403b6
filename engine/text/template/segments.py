"""What a prompt's segments are, in their order: tools, system blocks, the messages' parts."""

from itertools import accumulate, pairwise

from engine.protocol import Prompt, ToolUsePart


def segment_texts(prompt: Prompt) -> list[str | None]:
    """Every segment's text; None for those that are JSON objects."""
    texts: list[str | None] = [None] * len(prompt.tools)
    texts += [block.text for block in prompt.system]
    for message in prompt.messages:
        texts += [None if isinstance(p, ToolUsePart) else p.text for p in message.parts]
    return texts


def segment_kinds(prompt: Prompt) -> list[str]:
    """What every segment is: templates treat those of one kind alike."""
    kinds = ["tool"] * len(prompt.tools) + ["system prompt"] * len(prompt.system)
    for message in prompt.messages:
        kinds += [f"{message.role} {type(part).__name__}" for part in message.parts]
    return kinds


def segment_names(prompt: Prompt) -> list[str]:
    """The names of tools and calls; nothing for texts."""
    names = [tool.name for tool in prompt.tools] + [""] * len(prompt.system)
    for message in prompt.messages:
        names += [p.name if isinstance(p, ToolUsePart) else "" for p in message.parts]
    return names


def message_segments(prompt: Prompt) -> list[range]:
    """The segments of each message."""
    begin = len(prompt.tools) + len(prompt.system)
    ends = list(accumulate((len(message.parts) for message in prompt.messages), initial=begin))
    return [range(first, last) for first, last in pairwise(ends)]
