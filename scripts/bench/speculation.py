"""Speculation in the native engine: equal answers, acceptance, tokens a second on agents' prompts.

The demonstration model is asked what it was trained for: turns with tools whose results it tells,
behind system texts that have parts of its answers, as an agent's prompts have the files that it
edits. Each prompt is asked greedily and with seeded sampling, once with ENGINE_SPECULATION `off`
and once with `ngram`. The answers are compared token by token. They end as the model ends them.

Clients ask at the same time, each one prompt after the other, and nothing of their prompts is in
memory before. Decoding seconds are those of the requests, from first token to last.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engine import protocol
from engine.backends.looped import LoopedBackend
from scripts.bench.common import new_settings, running_backend
from scripts.bench.report import machine_line, table_of, verdict
from scripts.demo_model import data, turns
from scripts.setup.options import parse

MAX_TOKENS = 96
SYSTEM_CHARS = (200, 2000)
SAMPLINGS = {"greedy": 0.0, "seeded": 0.8}


@dataclass(frozen=True, slots=True)
class Answer:
    """The text's token ids, what calls have, and how long the decoding took."""

    tokens: tuple[int, ...]
    called: str
    reason: str
    output_tokens: int
    decode_seconds: float


@dataclass(frozen=True, slots=True)
class Run:
    sampling: str
    speculation: str
    answers: Sequence[Answer]
    counters: protocol.Counters

    @property
    def tokens_a_second(self) -> float:
        """Of one client while it decodes."""
        tokens = sum(max(answer.output_tokens - 1, 0) for answer in self.answers)
        return tokens / sum(answer.decode_seconds for answer in self.answers)

    @property
    def acceptance(self) -> float:
        return self.counters.accepted_draft_tokens / max(self.counters.draft_tokens, 1)

    @property
    def tokens_a_step(self) -> float:
        return self.counters.output_tokens / max(self.counters.sampling_steps, 1)


def main() -> int:
    options = parse(
        __doc__,
        prompts=500,
        clients=(1, "requests at once"),
        tokens=(8, "ENGINE_SPECULATION_TOKENS"),
        seed=1,
    )
    print(machine_line())
    print(
        f"demonstration model, {options.prompts} prompts, {options.clients} at once\n", flush=True
    )
    prompts = agent_prompts(random.Random(options.seed), options.prompts)
    runs = [
        asyncio.run(answer_all(prompts, name, speculation, options))
        for name in SAMPLINGS
        for speculation in ("off", "ngram")
    ]
    columns: dict[str, str | Callable[[Run], str]] = {
        "sampling": "{0.sampling}",
        "speculation": "{0.speculation}",
        "tokens/s a client": "{0.tokens_a_second:.1f}",
        "tokens a step": "{0.tokens_a_step:.2f}",
        "acceptance": lambda run: "" if run.speculation == "off" else f"{run.acceptance:.0%}",
        "output tokens": "{0.counters.output_tokens}",
    }
    print(table_of(runs, columns))
    differing = sum(
        replace(mine, decode_seconds=0.0) != replace(other, decode_seconds=0.0)
        for plain, speculated in zip(runs[::2], runs[1::2], strict=True)
        for mine, other in zip(plain.answers, speculated.answers, strict=True)
    )
    asked = len(prompts) * len(SAMPLINGS)
    print(f"\nanswers that differ: {differing} of {asked} ({verdict(not differing)})")
    return 1 if differing else 0


def agent_prompts(rng: random.Random, num: int) -> list[str]:
    """Raw prompts as the chat template writes them, up to where an answer begins."""
    prompts: list[str] = []
    while len(prompts) < num:
        box = turns.toolbox(rng)
        text = turns.tools_block([task.tool for task in box])
        text += turns.message(
            "system", data.distractor(rng, rng.randint(*SYSTEM_CHARS), "glossary")
        )
        for _ in range(rng.randint(1, 3)):
            for said, is_answer in turns.turn(rng, box):
                if is_answer and len(prompts) < num:
                    prompts.append(f"{text}<|im_start|>assistant\n")
                text += said
    return prompts


async def answer_all(prompts: Sequence[str], name: str, speculation: str, options: Any) -> Run:
    settings = new_settings(speculation=speculation, speculation_tokens=options.tokens)
    async with running_backend(settings) as backend:
        await answer(backend, "warm", prompts[0], SAMPLINGS[name])
        before = (await backend.stats()).counters
        answers: list[Answer | None] = [None] * len(prompts)
        left = iter(enumerate(prompts))

        async def client() -> None:
            for index, prompt in left:
                answers[index] = await answer(backend, f"r{index}", prompt, SAMPLINGS[name])

        await asyncio.gather(*(client() for _ in range(options.clients)))
        after = (await backend.stats()).counters
    counted = {
        field: getattr(after, field) - getattr(before, field) for field in after.__struct_fields__
    }
    given = [one for one in answers if one is not None]
    return Run(name, speculation, given, protocol.Counters(**counted))


async def answer(backend: LoopedBackend, name: str, prompt: str, temperature: float) -> Answer:
    """Raises RuntimeError where the request fails."""
    request = protocol.GenerateRequest(
        request_id=name,
        scope="bench",
        prompt=protocol.Prompt([], text=prompt),
        sampling=protocol.Sampling(
            max_tokens=MAX_TOKENS, temperature=temperature, seed=7, logprobs=0
        ),
    )
    tokens: list[int] = []
    reason, called = "", ""
    async for frame in await backend.open(request):
        match frame:
            case protocol.TextDelta():
                tokens += [told.drawn.token_id for told in frame.logprobs]
            case protocol.ToolUseStart():
                called += frame.name
            case protocol.ToolInputDelta():
                called += frame.partial_json
            case protocol.Finished():
                reason = frame.reason
            case protocol.Failed():
                raise RuntimeError(f"{name}: {frame.message}")
            case protocol.Done():
                return Answer(
                    tuple(tokens), called, reason, frame.output_tokens, frame.decode_seconds
                )
    raise RuntimeError(f"{name}: the frames ended early")


if __name__ == "__main__":
    sys.exit(main())
