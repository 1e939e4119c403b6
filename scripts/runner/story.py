"""What a lease is worth, in a terminal: a marked and an unmarked prefix, before and after a flood.

Prints what the API returned and what it measured itself, nothing else. The flood is larger than the
engine's memory, so with a big pool it takes a while; a small one makes a short story:
`scripts/run --engine-arg num_blocks=1024`.
"""

import argparse
import json
import os
import secrets
import sys
import time
from pathlib import Path

import httpx

from scripts.bench.load import Answer, ask_now, body_of, headers_of
from scripts.runner.example_prompt import handbook

QUESTION = "What is a lease?"
CLASSES = WRITTEN, READ, _ = (
    "cache_creation_input_tokens",
    "cache_read_input_tokens",
    "input_tokens",
)
FLOOD_RULES = 150
FLOOD_FACTOR = 1.3


class DemoError(Exception):
    """The story cannot be told; the message says why."""


def prompt_tokens(answer: Answer) -> int:
    return sum(answer.usage[name] for name in CLASSES)


def automatic(answer: Answer) -> int:
    return int(answer.message["holdfast"]["automatic_tokens"])


class DemoGateway:
    def __init__(self, url: str, key: str, admin_key: str) -> None:
        self._http = httpx.Client(
            base_url=url,
            timeout=600,
            headers=headers_of(key),
        )
        self._admin_url = f"{url}/admin/v1/engines"
        self._admin = {"authorization": f"Bearer {admin_key}"}
        self._model = ""

    def find_model(self) -> str:
        self._model = self._checked(self._http.get("/v1/models")).json()["data"][0]["id"]
        return self._model

    def pool_tokens(self) -> int:
        """How many tokens the ready engines hold together."""
        reply = self._checked(httpx.get(self._admin_url, headers=self._admin, timeout=10))
        shapes = [engine["description"] for engine in reply.json() if engine["status"] == "ready"]
        return sum(shape["num_blocks"] * shape["block_size"] for shape in shapes)

    def ask(self, system: str, *, marked: bool, max_tokens: int = 48) -> Answer:
        text = system if marked else [{"type": "text", "text": system}]
        body = body_of(self._model, text, QUESTION, max_tokens=max_tokens)
        answer = ask_now(self._http, body | {"temperature": 0, "stream": True})
        if answer.error:
            raise DemoError(answer.error)
        return answer

    def _checked(self, reply: httpx.Response) -> httpx.Response:
        if reply.status_code != 200:
            raise DemoError(f"{reply.request.url} answered {reply.status_code}: {reply.text[:300]}")
        return reply


def print_table(columns: dict[str, Answer]) -> None:
    answers = columns.values()
    rows = {name: [f"{one.usage[name]:,}" for one in answers] for name in CLASSES}
    rows["automatic_tokens (unbilled)"] = [f"{automatic(one):,}" for one in answers]
    seconds = [one.first_seconds or one.seconds for one in answers]
    rows["time to first token"] = [f"{one * 1000:,.0f} ms" for one in seconds]
    print(" " * 32 + "".join(f"{name:>18}" for name in columns))
    for label, cells in rows.items():
        print(f"  {label:<30}" + "".join(f"{cell:>18}" for cell in cells))
    print()


def flood(gateway: DemoGateway, tokens: int) -> None:
    """Send unmarked prompts, each of its own, until they add up to `tokens`."""
    sent = requests = 0
    started = time.perf_counter()
    while sent < tokens:
        text = handbook(f"flood {secrets.token_hex(4)}", FLOOD_RULES)
        sent += prompt_tokens(gateway.ask(text, marked=False, max_tokens=1))
        requests += 1
        left = (time.perf_counter() - started) * max(tokens - sent, 0) / sent
        print(f"\r  {requests} prompts, {sent:,} tokens, {left:.0f} s left   ", end="", flush=True)
    print(f"\r  {requests} prompts, {sent:,} tokens in {time.perf_counter() - started:.0f} s.   \n")


def tell(gateway: DemoGateway) -> int:
    model, pool = gateway.find_model(), gateway.pool_tokens()
    run = secrets.token_hex(3)  # so that a second story starts cold too
    marked, unmarked = handbook(f"marked {run}"), handbook(f"unmarked {run}")

    print(f"1. A long system prompt, marked with cache_control, twice ({model})\n")
    first, second = gateway.ask(marked, marked=True), gateway.ask(marked, marked=True)
    print_table({"first": first, "second": second})
    print(f"  It answers: {second.text.strip()}\n")

    print("2. Another one, not marked, twice: reuse happens, nothing is promised or billed\n")
    cold, warm = gateway.ask(unmarked, marked=False), gateway.ask(unmarked, marked=False)
    print_table({"first": cold, "second": warm})

    print(f"3. A flood of other prompts, {FLOOD_FACTOR} times the {pool:,} tokens the pool holds\n")
    flood(gateway, int(pool * FLOOD_FACTOR))

    print("4. Both again\n")
    kept, lost = gateway.ask(marked, marked=True), gateway.ask(unmarked, marked=False)
    print_table({"marked": kept, "unmarked": lost})
    kept_all = kept.usage[READ] == first.usage[WRITTEN]
    print(f"  The marked prefix was {'read in full' if kept_all else 'NOT read in full'}.")
    print(
        f"  Of the unmarked one {automatic(lost):,} of {automatic(warm):,} tokens were still there."
    )
    return 0 if kept_all else 1


def main() -> int:
    parser = argparse.ArgumentParser(prog="scripts/demo", description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="the gateway")
    parser.add_argument("--data", type=Path, default=Path("data"), help="as given to scripts/run")
    given = parser.parse_args()
    path = given.data / "secrets.json"
    stored = json.loads(path.read_text("utf-8")) if path.exists() else {}
    key = os.environ.get("HOLDFAST_API_KEY") or stored.get("api_key")
    admin_key = os.environ.get("HOLDFAST_ADMIN_KEY") or stored.get("admin_key")
    if not key or not admin_key:
        raise DemoError(f"no keys in {path} nor in HOLDFAST_API_KEY and HOLDFAST_ADMIN_KEY")
    return tell(DemoGateway(given.url, key, admin_key))


if __name__ == "__main__":
    try:
        sys.exit(main())
    except (DemoError, httpx.HTTPError) as error:
        sys.exit(f"demo: {error or type(error).__name__}; is scripts/run running?")
    except KeyboardInterrupt:
        sys.exit(130)
