"""What the engine makes of the chat templates of known model families.

    python -m scripts.docs.templates [--write]

Four turns of one conversation (a plain answer, a tool call, its result, another question) go
through the real renderer, cache and scheduler; only the model is left out. Prints the table of
engine/README.md; with --write it is put there. The templates are in tests/engine/text, written
for this project with the behaviour of the models' own.
"""

import argparse
import asyncio
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer

from engine.backends.base import Parts
from engine.backends.looped import LoopedBackend
from engine.backends.synthetic import SyntheticRunner
from engine.clock import ManualClock
from engine.errors import InvalidRequest
from engine.protocol import (
    Breakpoint,
    Capability,
    Description,
    GenerateRequest,
    InputUsage,
    Message,
    Prompt,
    Sampling,
    Started,
    TextPart,
    ThinkingPart,
    Tool,
    ToolResultPart,
    ToolUsePart,
)
from engine.settings import Settings
from engine.text.files import PromptFiles, read_prompt_files
from engine.text.renderer import ChatRenderer
from scripts.stack import ROOT

README = ROOT / "engine" / "README.md"
TEMPLATES = ROOT / "tests" / "engine" / "text" / "chat_templates"
DEMO_MODEL = ROOT / "engine" / "demo_model"
BEGIN, END = "<!-- templates -->", "<!-- /templates -->"
_CONTROL = re.compile(r"<\|\w+\|>|\[/?[A-Z_]+\]|<｜[^｜]+｜>|<(?:start|end)_of_turn>|</?think>")
_SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}

TOOLS = [
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}}}, "Weather."),
    Tool("get_time", {"type": "object", "properties": {"zone": {"type": "string"}}}, "The time."),
]
SYSTEM = TextPart("You are a careful assistant. You answer in whole sentences, and briefly.")
FIRST = Message("user", [TextPart("What can you tell me about cities?")])
ANSWER = Message("assistant", [ThinkingPart("They want a list."), TextPart("Weather and time.")])
SECOND = Message("user", [TextPart("How is the weather in Bern?")])
CALL = ToolUsePart("toolu_01A09q90qw90lq917835lq9A", "get_weather", {"city": "Bern"})
CALLING = Message("assistant", [ThinkingPart("I need the tool."), TextPart("I look."), CALL])
RESULT = Message("user", [ToolResultPart(CALL.id, "Rain and 12 degrees.")])
REPORT = Message("assistant", [ThinkingPart("That is wet."), TextPart("It rains.")])
THIRD = Message("user", [TextPart("Then what should I wear?")])
TURNS = [[FIRST], [ANSWER, SECOND], [CALLING, RESULT], [REPORT, THIRD]]
TURNS_WITHOUT_TOOLS = [[FIRST], [ANSWER, SECOND], [REPORT, THIRD], [ANSWER, FIRST]]


class Segment(NamedTuple):
    """A column of the table and the words by which its content is found in a rendered text."""

    kind: str
    words: str


class Row(NamedTuple):
    """`ends` by kind of segment, `reads` of the second to the last turn."""

    name: str
    formats: str
    ends: dict[str, str]
    reads: list[str]


SETTINGS: dict[str, Any] = {"secret": "0" * 16}
KINDS = ["tools", "system", "user", "thinking", "answer", "call", "result"]


def files_for(template: str) -> PromptFiles:
    """The demonstration tokenizer with the template's control tokens added."""
    tokenizer = Tokenizer.from_str(read_prompt_files(str(DEMO_MODEL)).tokenizer.to_str())
    controls = sorted(set(_CONTROL.findall(template)))
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in controls])
    return PromptFiles(
        tokenizer=tokenizer,
        templates={"default": template},
        special_tokens=_SPECIAL_TOKENS,
        end_token_ids=frozenset(),
    )


def turns_of(renderer: ChatRenderer) -> list[Prompt]:
    """The four prompts, each with all that came before."""
    turns = TURNS if renderer.tool_format is not None else TURNS_WITHOUT_TOOLS
    tools = TOOLS if renderer.tool_format is not None else []
    return [
        Prompt([message for turn in turns[: count + 1] for message in turn], tools, [SYSTEM])
        for count in range(len(turns))
    ]


def segments_of(prompt: Prompt) -> list[Segment]:
    found = [Segment("tools", f'"{tool.name}"') for tool in prompt.tools]
    found += [Segment("system", block.text) for block in prompt.system]
    for message in prompt.messages:
        for part in message.parts:
            match part:
                case TextPart(text):
                    found.append(Segment("user" if message.role == "user" else "answer", text))
                case ThinkingPart(text):
                    found.append(Segment("thinking", text))
                case ToolUsePart():
                    found.append(Segment("call", '"Bern"'))
                case ToolResultPart(_, text):
                    found.append(Segment("result", text))
    return found


def segment_ends(renderer: ChatRenderer, prompt: Prompt) -> dict[str, str]:
    """By kind, of the last segment of each: what the prefix up to its end is.

    `own`: it ends with the segment; `with …`: it contains another one behind it as well.
    """
    rendered = renderer.render(prompt, thinking=True)
    segments = segments_of(prompt)
    whole = renderer.tokenizer.decode(rendered.token_ids, skip_special_tokens=False)
    ends: dict[str, str] = {}
    for segment, span in zip(segments, rendered.segments, strict=True):
        if segment.words not in whole:
            ends[segment.kind] = "not rendered"
        elif span.end is None:
            ends[segment.kind] = "none"
        else:
            head = renderer.tokenizer.decode(
                rendered.token_ids[: span.end], skip_special_tokens=False
            )
            assert segment.words in head, f"{segment.kind} is not in its own prefix"
            others = [o.kind for o in segments if o.kind != segment.kind and o.words in head]
            before = [o.kind for o in segments[: segments.index(segment)]]
            beyond = [kind for kind in others if kind not in before]
            ends[segment.kind] = f"with {beyond[0]}" if beyond else "own"
    return ends


async def usages(renderer: ChatRenderer, prompts: Sequence[Prompt]) -> list[InputUsage | None]:
    """What each turn read and wrote in one engine; None where the template refuses it."""
    capabilities: list[Capability] = ["copy_on_write", "tools", "thinking"]
    description = Description(
        backend="synthetic",
        model="templates",
        epoch="",
        max_context_tokens=8192,
        block_size=16,
        num_blocks=1024,
        granularity=1,
        min_cache_tokens=1,
        capabilities=capabilities,
    )
    runner = SyntheticRunner(
        prefill_seconds=0, decode_seconds=0, copy_seconds=0, sleep=lambda _seconds: None
    )
    parts = Parts(
        runner=runner,
        renderer=renderer,
        description=description,
        step_tokens=512,
        block_bytes=1,
    )
    crashes: list[Exception] = []
    backend = LoopedBackend(Settings(**SETTINGS), ManualClock(), lambda *_: parts, crashes.append)
    backend.load(lambda _stage, _fraction: None)
    try:
        return [await _usage(backend, prompt, str(i)) for i, prompt in enumerate(prompts)]
    finally:
        await backend.stop()
        assert not crashes, crashes


async def _usage(backend: LoopedBackend, prompt: Prompt, request_id: str) -> InputUsage | None:
    """Marked as agents mark: the last tool, the system prompt, the end of the conversation."""
    marks = {len(prompt.tools), prompt.num_segments - 1}
    marks |= {len(prompt.tools) - 1} if prompt.tools else set()
    request = GenerateRequest(
        request_id=request_id,
        scope="0" * 32,
        prompt=prompt,
        sampling=Sampling(max_tokens=1),
        breakpoints=[Breakpoint(segment) for segment in sorted(marks)],
        thinking=True,
    )
    try:
        generation = await backend.open(request)
    except InvalidRequest:
        return None
    frames = [frame async for frame in generation]
    return next(frame.usage for frame in frames if isinstance(frame, Started))


def reads_of(found: Sequence[InputUsage | None]) -> list[str]:
    """Of what a turn held when it ended (read and written), how much the next one read."""
    cells: list[str] = []
    held = 0
    for usage in found:
        if usage is None:
            cells.append("refused")
            continue
        read = usage.cache_read_tokens
        cells.append("all" if read == held else f"{read} of {held}")
        held = read + usage.cache_write_5m_tokens
    return cells[1:]


def measure(path: Path) -> Row:
    renderer = ChatRenderer(files_for(path.read_text("utf-8")))
    prompts = turns_of(renderer)
    reads = reads_of(asyncio.run(usages(renderer, prompts)))
    formats = f"{renderer.tool_format or '–'}, {renderer.reasoning_format or '–'}"
    return Row(path.stem, formats, segment_ends(renderer, prompts[2]), reads)


def table() -> str:
    rows = [measure(path) for path in sorted(TEMPLATES.glob("*.jinja"))]
    heads = ["template", "tools, thinking", *KINDS, "turn 2 reads", "turn 3", "turn 4"]
    lines = ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
    for row in rows:
        cells = [row.name, row.formats, *(row.ends.get(kind, "") for kind in KINDS), *row.reads]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="put it into engine/README.md")
    options = parser.parse_args()
    written = table()
    if not options.write:
        print(written)
        return
    before, _, rest = README.read_text("utf-8").partition(BEGIN)
    after = rest.partition(END)[2]
    README.write_text(f"{before}{BEGIN}\n\n{written}\n\n{END}{after}", "utf-8")


if __name__ == "__main__":
    main()
