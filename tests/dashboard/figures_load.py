"""A load that goes wrong in every way, and what its clients count of it.

Two models on two engines, three workspaces, a TTL of each class, refusals, cancels, failures, and
one engine that is killed twice, in the middle of streams. Nothing here asks the gateway what it
counted.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Barrier
from typing import Any

import httpx

from engine.backends.synthetic import CONTEXT_TOKENS
from engine.protocol import TTLS as TTL_CLASSES
from scripts.bench.load import MESSAGES, headers_of, marked
from tests.e2e.fleet import Fleet, running_fleet
from tests.gateway.serving import eventually

CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"
NATIVE = 0
KILLED = 1
MODELS = ("holdfast-demo", "synthetic")
"""By engine: the native one's, and that of the one that is killed."""
WORKSPACES = ("code", "desk", "reports")
TTLS = (*TTL_CLASSES, "5m")
"""By prompt. Each workspace has a prompt of each."""
NUM_KILLS = 2
PREFILL_US = 200
BLOCK = 16
OWN = (
    {"ENGINE_BACKEND": "native", "ENGINE_NUM_BLOCKS": "4096"},
    {
        "ENGINE_BACKEND": "synthetic",
        "ENGINE_SYNTHETIC_PREFILL_US": str(PREFILL_US),
        "ENGINE_SYNTHETIC_DECODE_MS": "2",
        "ENGINE_NUM_BLOCKS": "4096",
    },
)
SETTINGS = {"ENGINE_MIN_CACHE_TOKENS": "64", "ENGINE_BLOCK_SIZE": str(BLOCK)}
PLAIN = {"mode": "explicit"}
CUT_OUTPUT = 4000
"""Tokens of an answer that runs, at 2 ms each, until its engine is killed."""


def rules_of(workspace: str, engine: int, which: int) -> str:
    """The marked text of a prompt. The last of each workspace is the same for both models."""
    whose = f"{which} of {workspace}"
    if which < len(TTLS) - 1:
        whose = f"{whose} for {MODELS[engine]}"
    return f"{whose}. " + "The lamp burns. " * (60 + 60 * which)


@dataclass(frozen=True, kw_only=True)
class Sent:
    """One turn, as the usage in its answer says it; `read` and `written` are of its one mark.
    `output` is not known of a cancelled one, and none is charged of one that was cut by the end of
    its engine (`is_cut`). `life` counts the processes of its engine."""

    workspace: str
    engine: int
    life: int
    ttl: str
    prefix: str
    input: int
    read: int
    written: int
    output: int | None
    is_cut: bool = False

    @property
    def model(self) -> str:
        return MODELS[self.engine]

    @property
    def prompt(self) -> int:
        return self.input + self.read + self.written


@dataclass
class Load:
    """`failed` turns were answered by an error of their engine, `refused` requests were none."""

    fleet: Fleet
    chance: random.Random
    keys: dict[str, str] = field(default_factory=dict)
    key_ids: dict[str, str] = field(default_factory=dict)
    turns: list[Sent] = field(default_factory=list)
    failed: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By workspace and engine."""
    refused: int = 0
    life: int = 0
    number: int = 0

    @property
    def url(self) -> str:
        return self.fleet.gateway.url

    @property
    def data(self) -> Path:
        return self.fleet.gateway.data

    def begin(self) -> None:
        for name in WORKSPACES:
            self.fleet.gateway.workspace(name)
            self.key_ids[name], self.keys[name] = self.fleet.gateway.make_key(name)

    def turn(self, engine: int | None = None) -> None:
        """One answered turn, streamed or not."""
        workspace = self.chance.choice(WORKSPACES)
        which = self.chance.randrange(len(TTLS))
        engine = self.chance.randrange(2) if engine is None else engine
        is_stream = self.chance.random() < 0.3
        self._ask(workspace, engine, which, is_stream=is_stream)

    def fill(self, engine: int) -> None:
        """A turn of each prompt, so that all are leased."""
        for workspace in WORKSPACES:
            for which in range(len(TTLS)):
                self._ask(workspace, engine, which, is_stream=False)

    def _ask(self, workspace: str, engine: int, which: int, *, is_stream: bool) -> None:
        self.number += 1
        ttl = TTLS[which]
        rules = rules_of(workspace, engine, which)
        question = f"{self.number}: why? " * self.chance.randrange(1, 9)
        output = self.chance.randrange(1, 6)
        life = self._life_of(engine)
        about = {"workspace": workspace, "engine": engine, "life": life, "ttl": ttl}
        headers = headers_of(self.keys[workspace])
        if ttl == "30m":
            content = [{"type": "text", "text": rules, "prompt_cache_breakpoint": PLAIN}]
            messages = [
                {"role": "system", "content": content},
                {"role": "user", "content": question},
            ]
            body = {"messages": messages, "prompt_cache_options": PLAIN, "max_tokens": output}
            reply = self._post(CHAT, headers, engine, body)
            usage = reply.raise_for_status().json()["usage"]
            prompt = usage["prompt_tokens"]
            counts = self._counts_of(prompt, usage["prompt_tokens_details"], about, rules)
            output = int(usage["completion_tokens"])
        elif ttl == "12h":
            mark = {**PLAIN, "ttl": ttl}
            content = [{"type": "input_text", "text": rules, "prompt_cache_breakpoint": mark}]
            messages = [
                {"role": "system", "content": content},
                {"role": "user", "content": question},
            ]
            body = {"input": messages, "prompt_cache_options": mark, "max_output_tokens": output}
            reply = self._post(RESPONSES, headers, engine, body)
            usage = reply.raise_for_status().json()["usage"]
            prompt = usage["input_tokens"]
            counts = self._counts_of(prompt, usage["input_tokens_details"], about, rules)
            output = int(usage["output_tokens"])
        else:
            messages = [{"role": "user", "content": question}]
            body = {"messages": messages, "system": marked(rules, ttl), "max_tokens": output}
            if is_stream:
                usage = self._streamed(headers, engine, body)
            else:
                reply = self._post(MESSAGES, headers, engine, body)
                usage = reply.raise_for_status().json()["usage"]
            written_tokens = usage["cache_creation"][f"ephemeral_{ttl}_input_tokens"]
            counts = (usage["input_tokens"], usage["cache_read_input_tokens"], written_tokens)
            output = int(usage["output_tokens"])
        self._take(about, rules, counts, output)

    def _take(
        self, about: dict[str, Any], rules: str, counts: Sequence[int], output: int | None
    ) -> None:
        input_tokens, read_tokens, written_tokens = counts
        sent = Sent(
            **about,
            prefix=rules,
            input=input_tokens,
            read=read_tokens,
            written=written_tokens,
            output=output,
        )
        self.turns.append(sent)

    def _counts_of(
        self, prompt: int, details: dict[str, int], about: dict[str, Any], rules: str
    ) -> tuple[int, int, int]:
        """Tokens neither read nor written, read, and written, by usage of OpenAI's APIs."""
        written_tokens = details["cache_write_tokens"]
        # Beyond the prefix it came out of memory without a mark.
        known = self._known(about["workspace"], about["engine"], rules)
        read_tokens = min(details["cached_tokens"], known)
        return prompt - read_tokens - written_tokens, read_tokens, written_tokens

    def _known(self, workspace: str, engine: int, rules: str) -> int:
        """The tokens of a prefix that was written in this life of the engine."""
        life = self._life_of(engine)
        lengths = (
            turn.written
            for turn in self.turns
            if (turn.workspace, turn.engine, turn.life, turn.prefix)
            == (workspace, engine, life, rules)
        )
        return max(lengths, default=0)

    def _life_of(self, engine: int) -> int:
        return self.life if engine == KILLED else 0

    def _post(
        self, path: str, headers: dict[str, str], engine: int, body: dict[str, Any]
    ) -> httpx.Response:
        return httpx.post(
            f"{self.url}{path}",
            json={"model": MODELS[engine], **body},
            headers=headers,
            timeout=300,
            trust_env=False,
        )

    def _streamed(
        self,
        headers: dict[str, str],
        engine: int,
        body: dict[str, Any],
        most: int | None = None,
        running: Callable[[], object] | None = None,
    ) -> dict[str, Any]:
        """The usage of a stream, which is broken off behind so many texts. `running` is called
        behind its second text; with it the stream must end by an error."""
        usage: dict[str, Any] = {}
        num_texts = 0
        request = {"model": MODELS[engine], "stream": True, **body}
        with httpx.stream(
            "POST",
            f"{self.url}{MESSAGES}",
            json=request,
            headers=headers,
            timeout=300,
            trust_env=False,
        ) as reply:
            for line in reply.iter_lines():
                if not line.startswith("data: "):
                    continue
                event = json.loads(line.removeprefix("data: "))
                if event["type"] == "message_start":
                    usage |= event["message"]["usage"]
                elif event["type"] == "message_delta":
                    usage |= event["usage"]
                elif event["type"] == "content_block_delta":
                    num_texts += 1
                    if num_texts == 2 and running is not None:
                        running()
                    if num_texts == most:
                        break
        assert (running is not None) == (event["type"] == "error"), event
        return usage

    def cancel(self) -> None:
        """A stream that its client breaks off, on the engine that lives on."""
        workspace = self.chance.choice(WORKSPACES)
        rules = rules_of(workspace, NATIVE, 0)
        self.number += 1
        messages = [{"role": "user", "content": f"{self.number}: go on"}]
        body = {"messages": messages, "system": marked(rules, "5m"), "max_tokens": 2000}
        usage = self._streamed(headers_of(self.keys[workspace]), NATIVE, body, most=2)
        written_tokens = usage["cache_creation"]["ephemeral_5m_input_tokens"]
        counts = (usage["input_tokens"], usage["cache_read_input_tokens"], written_tokens)
        about = {"workspace": workspace, "engine": NATIVE, "life": 0, "ttl": "5m"}
        self._take(about, rules, counts, None)

    def fail(self) -> None:
        """Only the engine knows that the prompt is too long with its roles."""
        workspace = self.chance.choice(WORKSPACES)
        messages = [{"role": "user", "content": "x" * 4 * (CONTEXT_TOKENS - 1)}]
        headers = headers_of(self.keys[workspace])
        reply = self._post(MESSAGES, headers, KILLED, {"messages": messages, "max_tokens": 5})
        assert reply.status_code == 400, reply.text
        self.failed[workspace, KILLED] += 1

    def refuse(self) -> None:
        """A body with a wrong value, and a key that nobody has."""
        messages = [{"role": "user", "content": "q"}]
        body = {"messages": messages, "max_tokens": -1}
        key = self.keys[self.chance.choice(WORKSPACES)]
        assert self._post(MESSAGES, headers_of(key), NATIVE, body).status_code == 400
        assert self._post(MESSAGES, headers_of("sk-nobody"), NATIVE, body).status_code == 401
        self.refused += 2

    def kill(self) -> None:
        """All its leases are held then, and it is in the middle of a stream of each workspace."""
        self.fill(KILLED)
        begun = Barrier(len(WORKSPACES) + 1)
        with ThreadPoolExecutor(len(WORKSPACES)) as pool:
            streams = [
                pool.submit(self._cut, workspace, lambda: begun.wait(300))
                for workspace in WORKSPACES
            ]
            begun.wait(300)
            self.fleet.kill(KILLED)
            usages = [stream.result() for stream in streams]
        for workspace, usage in zip(WORKSPACES, usages, strict=True):
            written_tokens = usage["cache_creation"]["ephemeral_5m_input_tokens"]
            counts = (usage["input_tokens"], usage["cache_read_input_tokens"], written_tokens)
            about = {"workspace": workspace, "engine": KILLED, "life": self.life, "ttl": "5m"}
            self._take({**about, "is_cut": True}, rules_of(workspace, KILLED, 0), counts, 0)
        eventually(lambda: self.fleet.num_ready() == 1)
        self.fleet.restart(KILLED)
        eventually(lambda: self.fleet.num_ready() == 2)
        self.life += 1

    def _cut(self, workspace: str, running: Callable[[], object]) -> dict[str, Any]:
        """The usage of a stream that its engine's end cuts."""
        messages = [{"role": "user", "content": "go on and on"}]
        system = marked(rules_of(workspace, KILLED, 0), "5m")
        body = {"messages": messages, "system": system, "max_tokens": CUT_OUTPUT}
        return self._streamed(headers_of(self.keys[workspace]), KILLED, body, running=running)

    def outputs(self) -> dict[int, int]:
        """By engine, the tokens it put out: of cancelled turns the engine alone knows them. They
        ran on the one that was not killed."""
        known = Counter[int]()
        for turn in self.turns:
            known[turn.engine] += turn.output or 0
        known[NATIVE] = int(self.fleet.stats(NATIVE)["counters"]["output_tokens"])
        return dict(known)

    def num_rows(self) -> int:
        return len(self.turns) + self.failed.total()


@contextmanager
def running_load(data: Path, num_turns: int, seed: str) -> Iterator[Load]:
    """The load, once all of it is in the ledger. Its engines and gateway still run."""
    gateway = {"HOLDFAST_MODELS": ""}
    with running_fleet(data, 2, 1, SETTINGS, gateway, per_engine=OWN) as fleet:
        load = Load(fleet, random.Random(seed))
        load.begin()
        for part in range(NUM_KILLS + 1):
            if part:
                load.kill()
            for _ in range(num_turns // (NUM_KILLS + 1)):
                load.turn()
            load.cancel()
            load.fail()
            load.refuse()
        load.fill(NATIVE)
        load.fill(KILLED)
        eventually(lambda: fleet.stats(NATIVE)["running"] == 0)
        eventually(lambda: len(fleet.gateway.rows()) == load.num_rows())
        yield load
