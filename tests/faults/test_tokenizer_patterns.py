"""An operator's `tokenizer.json` whose patterns backtrack (CWE-1333), on a real engine."""

import json
import shutil
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from uuid import uuid4

import httpx

from engine.settings import DEMO_MODEL
from scripts.stack import serving_engine

SECRET = "a-secret-of-some-length"
PATTERN = {"Regex": "(q|qq|q*)*(q*)*(q*)*Z"}
NUM_PATTERNS = 4
COSTLY = "q" * 4000
MIN_TURNS = 5
"""Of another scope, while the costly prompts are read."""


def with_patterns(directory: Path) -> Path:
    """The demo model with patterns that backtrack, where a text is normalized and where it is
    split."""
    model = directory / "model"
    shutil.copytree(DEMO_MODEL, model)
    path = model / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    replace = {"type": "Replace", "pattern": PATTERN, "content": "z"}
    split = {"type": "Split", "pattern": PATTERN, "behavior": "Isolated", "invert": False}
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [replace] * NUM_PATTERNS}
    steps = tokenizer["pre_tokenizer"]["pretokenizers"]
    tokenizer["pre_tokenizer"]["pretokenizers"] = [split] * NUM_PATTERNS + steps
    path.write_text(json.dumps(tokenizer))
    return model


def ask(url: str, text: str, scope: str) -> httpx.Response:
    body = {
        "request_id": uuid4().hex,
        "scope": scope * 32,
        "prompt": {"messages": [{"role": "user", "parts": [{"type": "text", "text": text}]}]},
        "sampling": {"max_tokens": 1},
    }
    headers = {"authorization": f"Bearer {SECRET}"}
    return httpx.post(f"{url}/v1/generate", json=body, headers=headers, timeout=300)


def test_an_engine_starts_and_answers_others_while_a_pattern_backtracks(tmp_path: Path) -> None:
    """The library ends a search after so many steps, a worker's time ends the others. No pattern
    runs where other turns wait."""
    settings = {"ENGINE_MODEL": str(with_patterns(tmp_path)), "ENGINE_SECRET": SECRET}
    with (
        serving_engine("native", settings, tmp_path / "log") as engine,
        ThreadPoolExecutor() as pool,
    ):
        url = engine.wait().url
        assert ask(url, "hello", "b").status_code == 200
        costly: list[Future[httpx.Response]] = [
            pool.submit(ask, url, f"{COSTLY}{number}", "a") for number in range(2)
        ]
        num_turns = 0
        while not all(turn.done() for turn in costly):
            assert ask(url, f"hello {num_turns}", "b").status_code == 200
            num_turns += 1
        assert num_turns >= MIN_TURNS
        for turn in costly:
            answer = turn.result()
            assert answer.status_code == 200 or answer.json()["code"] == "too_costly", answer.text
        assert ask(url, "hello again", "b").status_code == 200
