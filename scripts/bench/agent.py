"""The hit rate of a coding agent's traffic, with its nonce line kept out of prompts and left in.

The official SDK sends what such agents send, as captured requests in public issues show it: 20,000
tokens of tools and system; first in the system a billing line that differs in every request; a list
of betas nobody here knows, `?beta=true`, `metadata`, `context_management`, adaptive thinking;
markers on the last system block and the last two user messages; results of tools that grow the
conversation; reminders as `role: system` messages in its midst. On its way the main agent starts
sub-agents, all at once: *explorers* with a system prompt of their own and the same tools, and
*forks* that go on from the main agent's own conversation.

Every count is the API's. `hit rate` is read / prompt; `reused` came out of memory as well without
an entry that could be read. The tools called, their results and the user's words are scripted, the
same in both runs; the assistant's words are the server's. The default engine is the synthetic one:
pool, entries and leases are the real ones, and no model computes, so there are no times here.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from anthropic import Anthropic

from scripts.bench.agent_prompts import (
    BETAS,
    EXPLORER,
    HEADERS,
    MAIN,
    Prompts,
    billing_line,
    marked,
    metadata,
    with_marker,
)
from scripts.bench.report import machine_line, table_of
from scripts.options import parse
from scripts.stack import API_KEY, running_stack

RESULT_TOKENS = 600
MAX_TOKENS = 48


@dataclass(slots=True)
class Tally:
    """Sums over the turns of one kind of agent, in tokens."""

    turns: int = 0
    prompt: int = 0
    read: int = 0
    written: int = 0
    reused: int = 0

    def add(self, usage: Any, automatic_tokens: int) -> None:
        read, written = usage.cache_read_input_tokens, usage.cache_creation_input_tokens
        self.turns += 1
        self.prompt += usage.input_tokens + read + written
        self.read += read
        self.written += written
        self.reused += automatic_tokens

    def __add__(self, other: "Tally") -> "Tally":
        return Tally(*map(sum, zip(astuple(self), astuple(other), strict=True)))

    @property
    def hit_rate(self) -> float:
        return self.read / self.prompt if self.prompt else 0.0


@dataclass(slots=True)
class Agent:
    """One conversation; `ask` sends it with one message more and keeps the answer."""

    client: Anthropic
    prompts: Prompts
    model: str
    system: str
    rng: random.Random
    is_subagent: bool = False
    messages: list[dict[str, Any]] = field(default_factory=list)
    tally: Tally = field(default_factory=Tally)

    def ask(self, blocks: list[dict[str, Any]], reminder: str | None = None) -> None:
        """Send user blocks, and behind them a reminder as a message of the system."""
        self.messages.append({"role": "user", "content": blocks})
        if reminder is not None:
            self.messages.append({"role": "system", "content": reminder})
        with self.client.beta.messages.stream(
            model=self.model,
            max_tokens=MAX_TOKENS,
            betas=BETAS,
            system=[
                {"type": "text", "text": billing_line(self.rng, is_subagent=self.is_subagent)},
                {"type": "text", "text": self.prompts.identity},
                marked(self.system),
            ],
            tools=self.prompts.tools,
            messages=self._marked_messages(),
            metadata=metadata(),
            thinking={"type": "adaptive"},
            context_management={"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            extra_headers=HEADERS,
        ) as stream:
            answer = stream.get_final_message()
        extension = (answer.model_extra or {})["holdfast"]
        self.tally.add(answer.usage, extension["automatic_tokens"])
        words = "".join(block.text for block in answer.content if block.type == "text")
        said = [{"type": "text", "text": words}] if words else []
        self.messages.append({"role": "assistant", "content": said})

    def call(self, turn: int) -> None:
        """Add the scripted calls to the last answer and send what the tools said, two at times."""
        names = ["Read", "Grep"] if turn % 3 == 0 else ["Bash"]
        calls = [(f"toolu_{self.rng.getrandbits(96):024x}", name) for name in names]
        self.messages[-1]["content"] += [
            {"type": "tool_use", "id": id_, "name": name, "input": {"path": f"src/part_{turn}.py"}}
            for id_, name in calls
        ]
        results: list[dict[str, Any]] = [
            {
                "type": "tool_result",
                "tool_use_id": id_,
                "content": self.prompts.prose(RESULT_TOKENS // len(calls), f"{id_} {turn}"),
            }
            for id_, _ in calls
        ]
        reminder = "The to-do list has changed; go on with it." if turn % 4 == 1 else None
        self.ask(results, reminder)

    def fork(self, seed: int) -> "Agent":
        """Another agent with the same conversation behind it."""
        copied = json.loads(json.dumps(self.messages))
        return Agent(
            self.client, self.prompts, self.model, self.system, random.Random(seed), True, copied
        )

    def _marked_messages(self) -> list[Any]:
        """A copy with markers on the last block of the last two user messages."""
        users = [i for i, message in enumerate(self.messages) if message["role"] == "user"][-2:]
        return [
            {**message, "content": [*message["content"][:-1], with_marker(message["content"][-1])]}
            if index in users
            else message
            for index, message in enumerate(self.messages)
        ]


def main(arguments: list[str] | None = None) -> int:
    options = parse(
        __doc__,
        arguments,
        engine=("synthetic", None, ("synthetic", "native")),
        tokens=(20_000, "of tools and system"),
        turns=(16, "of the main agent"),
        subagents=(2, "explorers, and as many forks"),
    )
    print(machine_line())
    rates = {}
    for is_removing in (True, False):
        tallies = measure(options, is_removing=is_removing)
        report(tallies, is_removing=is_removing)
        rates[is_removing] = sum_of(tallies.values()).hit_rate
    print(f"\nhit rate {rates[True]:.1%} without the nonce lines, {rates[False]:.1%} with them")
    return 0


def measure(options: argparse.Namespace, *, is_removing: bool) -> dict[str, Tally]:
    """The tallies of one session against a fresh gateway and engine, by the kind of agent."""
    with tempfile.TemporaryDirectory() as work, model_of(options) as model:
        settings = {"ENGINE_LOG_LEVEL": "warning", "ENGINE_SYNTHETIC_PREFILL_US": "0"}
        settings["ENGINE_SYNTHETIC_DECODE_MS"] = "0"
        if model is not None:
            settings["ENGINE_MODEL"] = str(model.path)
        with running_stack(
            Path(work) / "data",
            backend=options.engine,
            engine_settings=settings,
            gateway_settings={"HOLDFAST_REMOVE_NONCES": str(is_removing).lower()},
        ) as stack, Anthropic(
            base_url=stack.gateway, api_key=API_KEY, timeout=600, max_retries=0
        ) as client:  # fmt: skip
            name = next(iter(client.models.list())).id
            return run_session(client, name, options, is_told=is_removing)


def run_session(
    client: Anthropic, model: str, options: argparse.Namespace, *, is_told: bool
) -> dict[str, Tally]:
    prompts = Prompts.sized(client, model, options.tokens)
    if is_told:
        size = f"{len(prompts.tools)} tools and the system prompt: {prompts.size:,} tokens"
        print(f"{options.engine} engine; {size}")
    main_agent = Agent(client, prompts, model, prompts.system[MAIN], random.Random(1))
    main_agent.ask([{"type": "text", "text": "Make the tests of the parser pass."}])
    explorers, forks = list[Agent](), list[Agent]()
    with ThreadPoolExecutor(2 * options.subagents or 1) as pool:
        running = []
        for turn in range(1, options.turns):
            if turn == options.turns // 3:
                system = prompts.system[EXPLORER]
                explorers = [
                    Agent(client, prompts, model, system, random.Random(10 + i), True)
                    for i in range(options.subagents)
                ]
                forks = [main_agent.fork(20 + i) for i in range(options.subagents)]
                turns = max(2, options.turns // 4)
                running = [pool.submit(work, agent, turns) for agent in [*explorers, *forks]]
            main_agent.call(turn)
        for one in running:
            one.result()
    return {
        "main agent": main_agent.tally,
        f"{len(explorers)} explorers": sum_of(agent.tally for agent in explorers),
        f"{len(forks)} forks": sum_of(agent.tally for agent in forks),
    }


def work(agent: Agent, turns: int) -> None:
    task = f"Find where number {agent.rng.getrandbits(32)} comes from."
    agent.ask([{"type": "text", "text": task}])
    for turn in range(1, turns):
        agent.call(turn)


def model_of(options: argparse.Namespace) -> AbstractContextManager[Any]:
    """For the native engine, a model with room for as many tokens again, and 32,000."""
    if options.engine != "native":
        return nullcontext()
    from scripts.bench.common import bench_model  # torch and transformers, for this engine only

    return bench_model(hidden=64, layers=1, context=2 * options.tokens + 32_000)


def sum_of(tallies: Iterable[Tally]) -> Tally:
    return sum(tallies, Tally())


def report(tallies: dict[str, Tally], *, is_removing: bool) -> None:
    print(f"\nHOLDFAST_REMOVE_NONCES={str(is_removing).lower()}")
    columns: dict[str, Callable[[tuple[str, Tally]], str]] = {
        "": "{0[0]}".format,
        "turns": "{0[1].turns}".format,
        "prompt tokens": "{0[1].prompt:,}".format,
        "read": "{0[1].read:,}".format,
        "written": "{0[1].written:,}".format,
        "hit rate": "{0[1].hit_rate:.1%}".format,
        "reused": "{0[1].reused:,}".format,
    }
    print(table_of([*tallies.items(), ("all", sum_of(tallies.values()))], columns))


if __name__ == "__main__":
    sys.exit(main())
