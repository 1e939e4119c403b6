"""The synthetic engine, whose first step raises an error: a panic for a long prompt. For a very
long one it asks the system for more memory than any machine has."""

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from engine import __main__ as program
from engine.backends import synthetic
from engine.backends.base import Parts, Progress
from engine.cache.ids import TokenId
from engine.schedule.runner import Work
from engine.settings import Settings

PANIC_TOKENS = 60
MEMORY_TOKENS = 400
SECRET_WORD = "whisper"


class Panic(BaseException):
    """As a library in Rust raises it: no Exception."""


class FailingRunner(synthetic.SyntheticRunner):
    def execute(self, works: Sequence[Work]) -> list[TokenId | None]:
        longest = max(len(work.token_ids) for work in works)
        if longest > MEMORY_TOKENS:
            bytearray(1 << 60)
        if longest > PANIC_TOKENS:
            raise Panic(f"panicked at {SECRET_WORD}")
        raise KeyError(f"{SECRET_WORD} {works[0].token_ids}")


def load(settings: Settings, progress: Progress) -> Parts:
    runner = FailingRunner(prefill_seconds=0, decode_seconds=0, copy_seconds=0, sleep=time.sleep)
    return replace(_load(settings, progress), runner=runner)


if __name__ == "__main__":
    _load = synthetic.load_synthetic
    synthetic.load_synthetic = load
    sys.exit(program.main(["--backend", "synthetic"]))
