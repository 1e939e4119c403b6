"""What a lease is worth, told in a terminal: two handbooks, one marked, before and after a flood.

It prints only what the API returned and what it measured itself. The flood is larger than the
engines' memory, unless that takes longer than FLOOD_SECONDS.
"""

import argparse
import os
import secrets
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import httpx

from scripts.bench.load import Answer, ask_now, body_of, headers_of
from scripts.runner.data import SECRETS, handbook, read_running, read_secrets
from scripts.runner.options import GATEWAY_PORT, default_data, from_caller
from scripts.stack import url_of

API_KEY = "HOLDFAST_API_KEY"
ADMIN_KEY = "HOLDFAST_ADMIN_KEY"
GREETING = "What is Holdfast?"
# The demo model's answers to these are right behind handbooks of any edition: see its README.
QUESTIONS = (
    "What does cache_control do?",
    "How long does a 5m lease live?",
    "What happens when a lease expires?",
)
WRITTEN = "cache_creation_input_tokens"
READ = "cache_read_input_tokens"
PLAIN = "input_tokens"
FLOOD_FACTOR = 1.3
FLOOD_SECONDS = 30.0
REFUSED = (401, 403)
LOOPBACK = ("127.0.0.1", "localhost", "::1")


class DemoError(Exception):
    """The story cannot be told. The message says why, and what to do."""


def prompt_tokens(answer: Answer) -> int:
    return sum(answer.usage[name] for name in (WRITTEN, READ, PLAIN))


def first_token(answer: Answer) -> float:
    """Seconds to the first token; for an answer without text, to its end."""
    return answer.first_seconds or answer.seconds


class DemoGateway:
    """A gateway with its keys. `place` says where the keys are from. Raises DemoError if the
    gateway refuses one of them.

    `model` is one of the gateway's models, by default its first one. Raises DemoError if the
    gateway has no such model.
    """

    def __init__(
        self, url: str, key: str, admin_key: str, place: str, model: str | None = None
    ) -> None:
        self._url = url
        self._place = place
        trusts = httpx.URL(url).host not in LOOPBACK
        self._http = httpx.Client(base_url=url, timeout=600, trust_env=trusts)
        engines = self._read("/admin/v1/engines", admin_key, ADMIN_KEY)
        names = [
            model_entry["id"] for model_entry in self._read("/v1/models", key, API_KEY)["data"]
        ]
        self.model: str = model or names[0]
        if self.model not in names:
            raise DemoError(f"{url} serves no {self.model}; --model is one of: {', '.join(names)}")
        self._http.headers.update(headers_of(key))
        ready = [engine["description"] for engine in engines if engine["status"] == "ready"]
        shapes = [shape for shape in ready if shape["model"] == self.model] or ready
        self.pool_tokens: int = sum(shape["num_blocks"] * shape["block_size"] for shape in shapes)

    def _read(self, path: str, key: str, variable: str) -> Any:
        reply = self._http.get(path, headers=headers_of(key))
        if reply.status_code == 200:
            return reply.json()
        if "sample data" in reply.text:
            raise DemoError(f"{self._url} shows sample data; start scripts/run without --sample")
        if reply.status_code in REFUSED:
            raise DemoError(
                f"{self._url} refuses the key of {self._place}; set {variable} to the one that its "
                "scripts/run printed, or name its --data"
            )
        reply_text = " ".join(reply.text[:200].split())
        raise DemoError(
            f"{self._url} is no gateway that can tell the story: {path} answered "
            f"{reply.status_code} {reply_text}; name another --port or --url"
        )

    def ask(self, question: str, system: str, *, marked: bool, max_tokens: int = 48) -> Answer:
        """Send a request and return the answer. Raises DemoError with what the gateway said."""
        text = system if marked else [{"type": "text", "text": system}]
        body = body_of(self.model, text if system else [], question, max_tokens=max_tokens)
        answer = ask_now(self._http, body | {"temperature": 0, "stream": True})
        if answer.error:
            raise DemoError(f"{self._url} answered: {answer.error}")
        return answer


def say(text: str) -> None:
    print(text, flush=True)


def tell_answer(
    gateway: DemoGateway, question: str, system: str = "", *, marked: bool = False
) -> Answer:
    """Ask, and show the answer and its counts by the API."""
    answer = gateway.ask(question, system, marked=marked)
    automatic = int(answer.message["holdfast"]["automatic_tokens"])
    counts = {
        "read from the cache": answer.usage[READ],
        "written to it": answer.usage[WRITTEN],
        "found in memory, by luck": 0 if marked else automatic,
    }
    reused = [f"{number:,} tokens {origin}" for origin, number in counts.items() if number]
    computed = prompt_tokens(answer) - answer.usage[READ] - automatic
    say(f"   {question} {answer.text.strip()}")
    after = seconds_text(first_token(answer))
    say(f"   first token after {after}: {', '.join([*reused, f'{computed:,} computed'])}")
    return answer


def flood(gateway: DemoGateway) -> int:
    """Send different unmarked prompts until they are more than the memory holds. Return their
    tokens."""
    pool = gateway.pool_tokens
    began = time.monotonic()
    tokens = 0
    while tokens < pool * FLOOD_FACTOR and time.monotonic() - began < FLOOD_SECONDS:
        text = handbook("flood", edition=secrets.token_hex(4))
        tokens += prompt_tokens(gateway.ask(GREETING, text, marked=False, max_tokens=1))
    seconds = time.monotonic() - began
    say(f"   {tokens:,} tokens in {seconds:.0f} s, {tokens / pool:.1f} times what the memory holds")
    return tokens


def tell(gateway: DemoGateway) -> str:
    """Tell the whole story and return its last sentence. Raises DemoError if it fails."""
    edition = secrets.token_hex(3)  # so that a second story starts cold too
    marked = handbook(edition=edition)
    unmarked = handbook("sales", edition=f"{edition}-s")
    say(f"{gateway.model}, with a memory of {gateway.pool_tokens:,} tokens")
    tell_answer(gateway, GREETING)
    say("1. A long handbook, marked with cache_control, and a question behind it")
    first = tell_answer(gateway, QUESTIONS[0], marked, marked=True)
    say("2. The same handbook, another question")
    second = tell_answer(gateway, QUESTIONS[1], marked, marked=True)
    say("3. Another handbook, not marked")
    tell_answer(gateway, QUESTIONS[0], unmarked)
    say("4. A flood: handbooks of others, each sent once")
    flood_tokens = flood(gateway)
    say("5. After the flood: the marked handbook, which has a lease")
    flooded_answer = tell_answer(gateway, QUESTIONS[2], marked, marked=True)
    say("6. After the flood: the one without")
    lost = tell_answer(gateway, QUESTIONS[2], unmarked)
    if flooded_answer.usage[READ] != first.usage[WRITTEN]:
        raise DemoError(
            f"of {first.usage[WRITTEN]:,} marked tokens {flooded_answer.usage[READ]:,} were read "
            "after the flood: see the dashboard's page Why, or the engine's log"
        )
    cold = first_token(first)
    warm = first_token(second)
    return (
        f"{cold / warm:.0f} times sooner: {seconds_text(cold)} → {seconds_text(warm)}; after a "
        f"flood of {flood_tokens:,} tokens still {seconds_text(first_token(flooded_answer))}, and "
        f"{seconds_text(first_token(lost))} without a lease."
    )


def seconds_text(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds >= 0.95 else f"{seconds:.2f} s"


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="scripts/demo",
        description="Tell what a lease is worth, against what scripts/run runs.",
    )
    port = "as given to scripts/run"
    parser.add_argument("--port", type=int, default=GATEWAY_PORT, metavar="P", help=port)
    parser.add_argument("--data", type=Path, metavar="DIR", help="as given to scripts/run")
    parser.add_argument("--model", help="one of the gateway's models; default: its first")
    parser.add_argument("--url", help="a gateway elsewhere; keys: HOLDFAST_API_KEY, _ADMIN_KEY")
    return parser.parse_args(arguments)


def run(options: argparse.Namespace) -> None:
    """Tell the story by these options. Raises DemoError, with what to do."""
    data = from_caller(options.data) if options.data else default_data(options.port)
    stored = read_secrets(data)
    running = read_running(data)
    url = (options.url or (running.gateway if running else url_of(options.port))).rstrip("/")
    keys = (os.environ.get(API_KEY, ""), os.environ.get(ADMIN_KEY, ""))
    place = "the environment"
    if stored and not (options.url and all(keys)):
        keys = (stored.api_key, stored.admin_key)
        place = str(data / SECRETS)
    if not all(keys):
        raise DemoError(
            f"no keys: nothing was ever run with {data}; start scripts/run in another terminal, "
            f"or set {API_KEY} and {ADMIN_KEY} for a gateway elsewhere"
        )
    try:
        last = tell(DemoGateway(url, *keys, place, options.model))
    except httpx.ConnectError as error:
        raise DemoError(
            f"nothing answers at {url}; start scripts/run in another terminal, or name its --port "
            "and --data"
        ) from error
    except (httpx.HTTPError, httpx.InvalidURL, LookupError, TypeError, ValueError) as error:
        raise DemoError(f"{url}: {error or type(error).__name__}") from error
    print(f"\n{last}")
    if running and running.dashboard and not options.url:
        print(f"See it in the dashboard: {running.dashboard}")


def leave(_number: int, _frame: FrameType | None) -> NoReturn:
    """End at once, without a traceback: nothing here needs an orderly end."""
    sys.stdout.write("\n")
    sys.stdout.flush()
    os._exit(130)


def main(arguments: list[str]) -> int:
    signal.signal(signal.SIGINT, leave)
    try:
        run(parse(arguments))
    except DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    return 0
