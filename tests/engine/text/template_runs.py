"""What the engine makes of a chat template: tokens, boundaries, and what twelve turns read.

Random conversations, with and without tools, go through the real renderer, and twelve turns of one
through the real cache and scheduler; only the model is left out.
"""

import asyncio
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

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
from engine.text.errors import TemplateRefused
from engine.text.files import PromptFiles
from engine.text.renderer import ChatRenderer
from engine.text.template.chat_template import ChatTemplate
from engine.text.template.messages import new_conversation
from tests.engine.text.conversations import Conversations
from tests.engine.text.vocabularies import tokenizer_for

SPECIAL_TOKENS = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>"}

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


class TemplateResult(NamedTuple):
    """`one_shot`, `lost` and `reads` are counts, each with the number that there are.

    `one_shot`: prompts whose tokens are those of the whole text in one call. `lost`: segments
    without a boundary. `reads`: turns 2 to 12 that read up to the last marked end before which the
    turn before has the same tokens. `inexact`: boundaries that lie before a segment's last
    characters, since a token joins these with what follows.
    """

    name: str
    formats: str
    one_shot: tuple[int, int]
    lost: tuple[int, int]
    inexact: int
    reads: tuple[int, int]
    needs: str


NUM_PROMPTS = 24
NUM_TURNS = 12


def files_for(template: str, kind: str = "llama3") -> PromptFiles:
    """A tokenizer whose merges cross punctuation, with the template's control tokens."""
    return PromptFiles(
        tokenizer=tokenizer_for(template, kind),
        templates={"default": template},
        special_tokens=SPECIAL_TOKENS,
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


def one_shot(renderer: ChatRenderer, template: ChatTemplate, name: str) -> TemplateResult:
    """Random prompts against what the template and the tokenizer alone make of them."""
    same = total = lost = inexact = segments = 0
    drawn = Conversations(1)
    for index in range(NUM_PROMPTS):
        tools = drawn.tools() if index % 2 and renderer.tool_format is not None else []
        prompt = drawn.prompt(num_turns=index % 6 + 1, tools=tools, has_system=index % 3 > 0)
        thinking = bool(index % 2)
        try:
            rendered = renderer.render(prompt, thinking=thinking)
        except InvalidRequest:
            continue
        plain = new_conversation(prompt, None, renderer.traits)
        text = template.render(plain.variables({}, thinking=thinking))
        expected = renderer.tokenizer.encode(text, add_special_tokens=False).ids
        total += 1
        same += expected == rendered.token_ids
        segments += len(rendered.segments)
        lost += sum(span.end is None for span in rendered.segments)
        inexact += sum(not span.is_exact for span in rendered.segments)
    formats = f"{renderer.tool_format or '–'}, {renderer.reasoning_format or '–'}"
    return TemplateResult(name, formats, (same, total), (lost, segments), inexact, (0, 0), "")


def long_conversation(renderer: ChatRenderer, num_turns: int) -> list[Prompt]:
    """The prompts of one conversation, each with all that came before."""
    tools = TOOLS if renderer.tool_format is not None else []
    system = [SYSTEM]
    messages: list[Message] = []
    prompts: list[Prompt] = []
    for turn in range(num_turns):
        messages.append(Message("user", [TextPart(f"Question {turn}: how is it in Bern, then?")]))
        prompts.append(Prompt(list(messages), tools, system))
        if tools and turn % 2:
            call = ToolUsePart(f"toolu_{turn:021}", "get_weather", {"city": f"Bern {turn}"})
            thought = ThinkingPart(f"I need the tool for {turn}.")
            messages.append(Message("assistant", [thought, call]))
            messages.append(Message("user", [ToolResultPart(call.id, f"Rain, {turn} degrees.")]))
            prompts.append(Prompt(list(messages), tools, system))
        thought = ThinkingPart(f"That is wet, {turn}.")
        messages.append(Message("assistant", [thought, TextPart(f"It rains at {turn} degrees.")]))
    return prompts[:num_turns]


def marked_segments(prompt: Prompt) -> list[int]:
    """Marked as agents mark: the tools, the system prompt, the last two turns of the user."""
    num_first = len(prompt.tools) + len(prompt.system)
    ends = list(accumulate((len(m.parts) for m in prompt.messages), initial=num_first - 1))[1:]
    users = [end for end, m in zip(ends, prompt.messages, strict=True) if m.role == "user"]
    marks = {num_first - 1, *users[-2:]} | ({len(prompt.tools) - 1} if prompt.tools else set())
    return sorted(marks)


def possible_reads(renderer: ChatRenderer, prompts: Sequence[Prompt]) -> list[int]:
    """For every turn but the first the last marked end up to which the turn before is equal."""
    rendered = [renderer.render(prompt, thinking=True) for prompt in prompts]
    found: list[int] = []
    for prompt, before, after in zip(prompts, rendered, rendered[1:], strict=False):
        pairs = zip(before.token_ids, after.token_ids, strict=False)
        common = next((i for i, (a, b) in enumerate(pairs) if a != b), len(before.token_ids))
        ends = [before.segments[segment].end or 0 for segment in marked_segments(prompt)]
        found.append(max((end for end in ends if end <= common), default=0))
    return found


async def usages(renderer: ChatRenderer, prompts: Sequence[Prompt]) -> list[InputUsage | None]:
    """What each turn read and wrote in one engine; None where the template refuses it."""
    frames = await first_frames(renderer, prompts)
    return [None if frame is None else frame.usage for frame in frames]


async def first_frames(renderer: ChatRenderer, prompts: Sequence[Prompt]) -> list[Started | None]:
    """What one engine says of each turn first; None where the template refuses it."""
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
    crashes: list[BaseException] = []
    backend = LoopedBackend(
        Settings.model_validate({"secret": "0" * 16}),
        ManualClock(),
        lambda *_: parts,
        crashes.append,
    )
    backend.load(lambda _stage, _fraction: None)
    try:
        return [await _started(backend, prompt, str(i)) for i, prompt in enumerate(prompts)]
    finally:
        await backend.stop()
        assert not crashes, crashes


async def _started(backend: LoopedBackend, prompt: Prompt, request_id: str) -> Started | None:
    request = GenerateRequest(
        request_id=request_id,
        scope="0" * 32,
        prompt=prompt,
        sampling=Sampling(max_tokens=1),
        breakpoints=[Breakpoint(segment) for segment in marked_segments(prompt)],
        thinking=True,
    )
    try:
        generation = await backend.open(request)
    except InvalidRequest:
        return None
    frames = [frame async for frame in generation]
    return next(frame for frame in frames if isinstance(frame, Started))


def measure(path: Path) -> TemplateResult:
    source = path.read_text("utf-8")
    try:
        renderer = ChatRenderer(files_for(source))
    except (TemplateRefused, ValueError) as error:
        return TemplateResult(path.stem, f"refused: {error}", (0, 0), (0, 0), 0, (0, 0), "")
    template = ChatTemplate({"default": source}, SPECIAL_TOKENS)
    row = one_shot(renderer, template, path.stem)
    prompts = long_conversation(renderer, NUM_TURNS)
    needs = ", ".join(f for f in renderer.traits.__slots__ if getattr(renderer.traits, f) is True)
    try:
        possible = possible_reads(renderer, prompts)
    except InvalidRequest:
        return row._replace(needs=needs)
    found = asyncio.run(usages(renderer, prompts))[1:]
    whole = sum(
        usage is not None and usage.cache_read_tokens >= least
        for usage, least in zip(found, possible, strict=True)
    )
    return row._replace(reads=(whole, len(possible)), needs=needs)
