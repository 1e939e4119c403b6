"""A turn that waited at the gateway reads what was readable when it arrived there.

Real time: the manual clock takes every request for one that has just arrived.
"""

import json
import time
from typing import Any

import httpx
import pytest

from scripts.stack import ENGINE_SECRET, serving_engine

LIFE_SECONDS = 6.0
# A busy machine may take longer than an entry lives; hardly each time.
TRIES = 5
ENGINE = {
    "ENGINE_TTL_SCALE": str(LIFE_SECONDS / 300),
    "ENGINE_MIN_CACHE_TOKENS": "32",
    "ENGINE_NUM_BLOCKS": "512",
    "ENGINE_SYNTHETIC_CONTEXT": "4096",
    "ENGINE_SYNTHETIC_PREFILL_US": "1",
    "ENGINE_LOG_LEVEL": "error",
}
SCOPE, OTHER = "a" * 32, "b" * 32


class Engine:
    def __init__(self, url: str) -> None:
        self._url = url
        self._number = 0

    def ask(self, text: str, age: float, scope: str = SCOPE) -> dict[str, Any]:
        """The usage of one request that arrived at its gateway `age` seconds ago."""
        self._number += 1
        parts = [{"type": "text", "text": text}, {"type": "text", "text": f"q{self._number}"}]
        body = {
            "request_id": f"r{self._number}",
            "scope": scope,
            "age_seconds": age,
            "prompt": {"messages": [{"role": "user", "parts": parts}]},
            "breakpoints": [{"segment": 0, "ttl": "5m"}] if scope == SCOPE else [],
            "sampling": {"max_tokens": 1},
        }
        headers = {"authorization": f"Bearer {ENGINE_SECRET}"}
        reply = httpx.post(f"{self._url}/v1/generate", json=body, headers=headers, timeout=120)
        frames = [json.loads(line) for line in reply.text.splitlines() if line.strip()]
        return dict(frames[0]["usage"])


@pytest.mark.parametrize("num_others", [0, 12])
def test_an_entry_that_was_readable_at_arrival_is_read_after_its_expiry(num_others: int) -> None:
    """Also where others fill the pool between the expiry and the submission."""
    text = "one two three four " * 60
    with serving_engine("synthetic", ENGINE) as server:
        engine = Engine(server.wait().url)
        engine.ask("the first one waits for a worker", 0.0, OTHER)
        for number in range(TRIES):
            # Each try writes an entry of its own.
            if is_read_late(engine, f"{number} {text}", num_others):
                break
        else:
            pytest.fail("each time the entry could not have been readable")
        time.sleep(LIFE_SECONDS)
        missed = engine.ask(f"{number} {text}", 0.0)
        assert missed["cache_read_tokens"] == 0, "who arrived after the expiry reads nothing"


def is_read_late(engine: Engine, text: str, num_others: int) -> bool:
    """Write an entry, let it expire, and ask as one who arrived in the middle of its life.

    False where that moment may have been outside of its life, since the machine was too busy.
    """
    began = time.monotonic()
    written = engine.ask(text, 0.0)["cache_write_5m_tokens"]
    wrote_at = time.monotonic()
    assert written > 32
    time.sleep(LIFE_SECONDS + 0.5)
    for number in range(num_others):
        engine.ask(f"{number} other words here " * 400, 0.0, OTHER)
    late = time.monotonic() - wrote_at
    assert late > LIFE_SECONDS
    read = engine.ask(text, late - LIFE_SECONDS / 2)["cache_read_tokens"]
    # The engine counts the age back from when the request reached it.
    last_arrival = time.monotonic() - (late - LIFE_SECONDS / 2)
    if last_arrival > began + LIFE_SECONDS:
        return False
    assert read == written, f"submitted after {late:.1f} s"
    return True
