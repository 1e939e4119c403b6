"""Turn a decoder's complaint into the wire's error text: `messages.0.content.1.text: why`.

Paths are dotted, list positions are numbers, and a content block's type follows its position.
"""

import re

from gateway.dialects.anthropic.content import SUPPORTED_BLOCKS
from gateway.dialects.complaints import Document, split_complaint

_STEP = re.compile(r"\[(\d+|\.\.\.)\]|\.?([^.\[]+)")
_FIELD = re.compile(r"^Object (missing required|contains unknown) field `(.*)`$", re.DOTALL)
_EXPECTED = re.compile(r"^Expected `([^`]*)`(?: (>=|<=|>|<) (\S+)|.*of length (<=|>=) (\d+))?")
_BOUNDS = {
    ">=": "greater than or equal to",
    "<=": "less than or equal to",
    ">": "greater than",
    "<": "less than",
}
_KINDS = {
    "str": "string",
    "int": "integer",
    "float": "number",
    "bool": "boolean",
    "array": "list",
    "object": "object",
    "null": "null",
}
_CHOICES = {
    "ttl": "'5m' or '1h'",
    "role": "'user', 'assistant' or 'system'",
    "service_tier": "'auto' or 'standard_only'",
    "speed": "'standard' or 'fast'",
    "media_type": "'text/plain'",
}
_TAGS = {
    "cache_control": ("ephemeral",),
    "tool_choice": ("auto", "any", "tool", "none"),
    "thinking": ("enabled", "adaptive", "disabled", "between_tools"),
    "source": ("base64", "text", "content", "url", "file"),
    "format": ("json_schema",),
    "caller": ("direct",),
    "thread": ("create", "continue"),
}

_MAX_SHOWN = 64

Steps = list[str | int]


def validation_error(complaint: str, body: bytes) -> str:
    what, path = split_complaint(complaint)
    steps = _steps(path)
    document = Document(body)
    return _explain(what, steps, document)


def _explain(what: str, steps: Steps, document: Document) -> str:
    if field := _FIELD.match(what):
        is_missing = field[1] == "missing required"
        reason = "Field required" if is_missing else "Extra inputs are not permitted"
        if field[2] == "type" and is_missing and _is_tagged(steps):
            return f"{_path(steps, document)}: Unable to extract tag using discriminator 'type'"
        return f"{_path([*steps, field[2][:_MAX_SHOWN]], document)}: {reason}"
    if steps and steps[-1] == "type" and what.startswith("Invalid"):
        return _bad_tag(steps[:-1], document)
    path = _path(steps, document)
    return f"{path}: {_reason(what, steps)}" if path else _reason(what, steps)


def _reason(what: str, steps: Steps) -> str:
    choices = _CHOICES.get(str(steps[-1])) if steps else None
    if choices and what.startswith(("Invalid enum value", "Expected `str")):
        return f"Input should be {choices}"
    expected = _EXPECTED.match(what)
    if expected is None:
        return "Input is not valid" if steps else "The request body is not valid"
    if expected[2]:
        return f"Input should be {_BOUNDS[expected[2]]} {expected[3]}"
    if expected[4]:
        most = "at most" if expected[4] == "<=" else "at least"
        return f"List should have {most} {expected[5]} items"
    kinds = [_KINDS.get(kind, kind) for kind in expected[1].split(" | ")]
    return f"Input should be a valid {' or '.join(kind for kind in kinds if kind != 'null')}"


def _bad_tag(steps: Steps, document: Document) -> str:
    tag = document.at([*steps, "type"])
    path = _path(steps, document, last_type=False)
    parent = next((step for step in reversed(steps) if isinstance(step, str)), "")
    tags = _TAGS.get(parent, SUPPORTED_BLOCKS)
    names = ", ".join(f"'{name}'" for name in tags)
    shown = tag[:64] if isinstance(tag, str) else tag if isinstance(tag, int | float) else "…"
    return (
        f"{path}: Input tag '{shown}' found using 'type' does not match any of the expected"
        f" tags: {names}"
    )


def _is_tagged(steps: Steps) -> bool:
    return bool(steps) and (isinstance(steps[-1], int) or steps[-1] in _TAGS)


def _steps(path: str) -> Steps:
    return [int(index) if index.isdigit() else index or name for index, name in _STEP.findall(path)]


def _path(steps: Steps, document: Document, *, last_type: bool = True) -> str:
    """Write a path, with each content block's type after its position in `content`."""
    written: list[str] = []
    for depth, step in enumerate(steps):
        written.append(str(step))
        is_last = depth == len(steps) - 1
        if is_last and not last_type:
            break
        if isinstance(step, int) and depth and steps[depth - 1] == "content":
            kind = document.at([*steps[: depth + 1], "type"])
            if isinstance(kind, str) and kind in SUPPORTED_BLOCKS:
                written.append(kind)
        elif step == "cache_control" and not is_last:
            written.append("ephemeral")
    return ".".join(written)
