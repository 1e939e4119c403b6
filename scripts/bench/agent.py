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
same in both runs; the assistant's words are the server's. The engine is the synthetic one: pool,
entries and leases are the real ones, and no model computes, so there are no times here.
"""

import argparse
import json
import random
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
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
from scripts.bench.report import machine_line, table
from scripts.setup.options import parse
from scripts.stack import API_KEY, running_stack

RESULT_TOKENS = 600
MAX_TOKENS = 48
KINDS = ("turns", "prompt tokens", "read", "written", "reused")
ENGINE = {
    "ENGINE_LOG_LEVEL": "warning",
    "ENGINE_SYNTHETIC_PREFILL_US": "0",
    "ENGINE_SYNTHETIC_DECODE_MS": "0",
}


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
    tally: Counter[str] = field(default_factory=Counter)
    """Sums over the turns, in tokens: what KINDS names."""

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
        read, written = (
            getattr(answer.usage, f"cache_{kind}_input_tokens") for kind in ("read", "creation")
        )
        self.tally.update(
            {
                "turns": 1,
                "prompt tokens": answer.usage.input_tokens + read + written,
                "read": read,
                "written": written,
                "reused": (answer.model_extra or {})["holdfast"]["automatic_tokens"],
            }
        )
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
        tokens=(20_000, "of tools and system"),
        turns=(16, "of the main agent"),
        subagents=(2, "explorers, and as many forks"),
    )
    print(machine_line())
    rates = {}
    for is_removing in (True, False):
        tallies = measure(options, is_removing=is_removing)
        report(tallies, is_removing=is_removing)
        rates[is_removing] = hit_rate(sum_of(tallies.values()))
    print(f"\nhit rate {rates[True]:.1%} without the nonce lines, {rates[False]:.1%} with them")
    return 0


def measure(options: argparse.Namespace, *, is_removing: bool) -> dict[str, Counter[str]]:
    """The tallies of one session against a fresh gateway and engine, by the kind of agent."""
    settings = {"HOLDFAST_REMOVE_NONCES": str(is_removing).lower()}
    with (
        tempfile.TemporaryDirectory() as data,
        running_stack(Path(data), "synthetic", ENGINE, settings) as stack,
        Anthropic(base_url=stack.gateway, api_key=API_KEY, timeout=600, max_retries=0) as client,
    ):
        return run_session(client, options, is_told=is_removing)


def run_session(
    client: Anthropic, options: argparse.Namespace, *, is_told: bool
) -> dict[str, Counter[str]]:
    model = next(iter(client.models.list())).id
    prompts = Prompts.sized(client, model, options.tokens)
    if is_told:
        size = f"{len(prompts.tools)} tools and the system prompt: {prompts.size:,} tokens"
        print(f"synthetic engine; {size}")
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


def sum_of(tallies: Iterable[Counter[str]]) -> Counter[str]:
    return sum(tallies, Counter())


def hit_rate(tally: Counter[str]) -> float:
    return tally["read"] / tally["prompt tokens"]


def report(tallies: dict[str, Counter[str]], *, is_removing: bool) -> None:
    print(f"\nHOLDFAST_REMOVE_NONCES={str(is_removing).lower()}")
    rows = [
        [name, *(f"{tally[kind]:,}" for kind in KINDS[:4]), f"{hit_rate(tally):.1%}",
         f"{tally['reused']:,}"]
        for name, tally in [*tallies.items(), ("all", sum_of(tallies.values()))]
    ]  # fmt: skip
    print(table(("", *KINDS[:4], "hit rate", "reused"), rows))


if __name__ == "__main__":
    sys.exit(main())
