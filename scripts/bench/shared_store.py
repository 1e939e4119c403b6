"""Hit rate of traffic that alternates between two engines, without and with a shared store.

Conversations grow turn by turn; the system prompt and each turn's end are marked for an hour. The
same turns are sent to one engine, to two engines in turn, to two engines in turn that share a
store, and to one gateway that chooses between two engines that share a store. In the first three
each engine has a gateway of its own, so that no routing decides. Between two turns of a
conversation the others' are sent, and `pause` seconds pass: an engine writes to the store behind
the scenes. Engines are native, with the demo model. Rates are `cache_read_input_tokens` of all
prompt tokens, as the gateways tell.
"""

import random
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import httpx

from scripts.bench.load import body_of, marked
from scripts.bench.report import table_of
from scripts.faults.store import prompt_of
from scripts.setup.options import parse
from scripts.stack import API_HEADERS, serving_engine, serving_gateway

MODEL = "holdfast-demo"


class Fleet(NamedTuple):
    """`is_routed`: one gateway has all engines. Otherwise each engine has its own."""

    name: str
    num_engines: int
    has_store: bool
    is_routed: bool = False


FLEETS = (
    Fleet("one engine", 1, has_store=False),
    Fleet("two in turn", 2, has_store=False),
    Fleet("two in turn, one store", 2, has_store=True),
    Fleet("two, routed, one store", 2, has_store=True, is_routed=True),
)


@dataclass
class Outcome:
    """Tokens of all prompts, and those read: from any tier, and with blocks from disk."""

    name: str
    prompt: int = 0
    read: int = 0
    from_disk: int = 0

    @property
    def rate(self) -> float:
        return self.read / self.prompt

    def take(self, answer: dict[str, Any]) -> None:
        usage = answer["usage"]
        read = usage["cache_read_input_tokens"]
        self.prompt += usage["input_tokens"] + usage["cache_creation_input_tokens"] + read
        self.read += read
        self.from_disk += read if answer["holdfast"].get("read_tier") == "disk" else 0


class Conversation:
    """A system prompt, and turns behind it. The last turn's end is marked."""

    def __init__(self, rng: random.Random, words: int) -> None:
        self._rng = rng
        self._words = words
        self._system = prompt_of(rng, words)
        self._messages: list[dict[str, Any]] = []

    def body(self) -> dict[str, Any]:
        question = marked(prompt_of(self._rng, self._words // 4), "1h")
        for message in self._messages:
            message["content"] = message["content"][:1]
            message["content"][0].pop("cache_control", None)
        self._messages.append({"role": "user", "content": question})
        system = marked(self._system, "1h")
        return body_of(MODEL, system, "", messages=self._messages, max_tokens=4)

    def take(self, answer: dict[str, Any]) -> None:
        text = "".join(part.get("text", "") for part in answer["content"])
        content = [{"type": "text", "text": text.strip() or "."}]
        self._messages.append({"role": "assistant", "content": content})


def converse(gateways: Sequence[str], fleet: Fleet, options: Namespace) -> Outcome:
    """Every conversation's next turn, in order, each at the next gateway."""
    rng = random.Random(options.seed)
    outcome = Outcome(fleet.name)
    conversations = [Conversation(rng, options.words) for _ in range(options.conversations)]
    with httpx.Client(timeout=600, trust_env=False, headers=API_HEADERS) as http:
        for turn in range(options.turns):
            for number, conversation in enumerate(conversations):
                url = gateways[(turn + number) % len(gateways)]
                reply = http.post(f"{url}/v1/messages", json=conversation.body())
                answer: dict[str, Any] = reply.raise_for_status().json()
                outcome.take(answer)
                conversation.take(answer)
            time.sleep(options.pause)
    return outcome


def measure(fleet: Fleet, options: Namespace) -> Outcome:
    with TemporaryDirectory(prefix="shared-store-") as directory, ExitStack() as life:
        folder = Path(directory)
        settings = {
            "ENGINE_NUM_BLOCKS": "4096",
            "ENGINE_MIN_CACHE_TOKENS": "16",
            "ENGINE_THREADS": str(options.threads),
        }
        if fleet.has_store:
            settings |= {"ENGINE_STORE": str(folder / "store"), "ENGINE_STORE_SHARED": "true"}
        servers = [
            life.enter_context(serving_engine("native", settings, folder / f"engine-{number}.log"))
            for number in range(fleet.num_engines)
        ]
        engines = [server.wait().url for server in servers]
        groups = [engines] if fleet.is_routed else [[url] for url in engines]
        gateways = [
            life.enter_context(
                serving_gateway(folder / f"gateway-{number}", group, log=folder / f"{number}.log")
            )
            for number, group in enumerate(groups)
        ]
        return converse([gateway.wait().url for gateway in gateways], fleet, options)


def main() -> int:
    options = parse(
        __doc__,
        conversations=(8, "conversations"),
        turns=(6, "turns of each"),
        words=(200, "words of a system prompt; each turn has a quarter of it"),
        pause=(2.0, "seconds between two turns of a conversation"),
        threads=(1, "CPU threads of each engine"),
        seed=1,
    )
    outcomes = [measure(fleet, options) for fleet in FLEETS]
    columns = {
        "engines": "{.name}",
        "prompt tokens": "{.prompt:,}",
        "read": "{.rate:.1%}",
        "of it with blocks from disk, tokens": "{.from_disk:,}",
    }
    print(table_of(outcomes, columns))
    return 0


if __name__ == "__main__":
    sys.exit(main())
