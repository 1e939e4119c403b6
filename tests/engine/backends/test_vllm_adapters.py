"""Adapters that vLLM does not take leave nothing behind."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from engine.backends.vllm.core import VllmAdapters
from engine.peft import CONFIG, WEIGHTS
from engine.refusal import StartRefused


class RefusingCore:
    """In vLLM's place. It looks whether it is given a copy."""

    def __init__(self) -> None:
        self.copy = Path()

    async def add_adapter(self, digest: str, directory: str) -> None:
        self.copy = Path(directory)
        assert (self.copy / WEIGHTS).read_bytes() == b"weights"
        raise StartRefused("vLLM: rank 64 is greater than 16")


def test_no_copy_of_a_refused_adapter_stays(tmp_path: Path) -> None:
    asyncio.run(refuse(tmp_path))


async def refuse(tmp_path: Path) -> None:
    config = {"peft_type": "LORA", "r": 64, "lora_alpha": 8}
    (tmp_path / CONFIG).write_text(json.dumps(config))
    (tmp_path / WEIGHTS).write_bytes(b"weights")
    core: Any = RefusingCore()
    adapters = VllmAdapters(core, asyncio.get_running_loop())
    with pytest.raises(StartRefused, match="rank 64"):
        await asyncio.to_thread(adapters.read, tmp_path)
    assert not core.copy.exists() and core.copy.parent.is_dir()
    # A disk without room for the copy is the adapter's refusal, not the engine's end.
    adapters.close()
    with pytest.raises(StartRefused):
        core.copy.parent.write_text("no folder")
        await asyncio.to_thread(adapters.read, tmp_path)
    core.copy.parent.unlink()
