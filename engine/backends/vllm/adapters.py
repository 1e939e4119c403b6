"""The adapters on a vLLM, whose own kernels compute them.

vLLM reads an adapter's folder again whenever it has put the adapter aside. So it is given a copy of
what was read and digested here, which nobody writes to.
"""

import asyncio
from pathlib import Path
from shutil import rmtree
from tempfile import TemporaryDirectory
from typing import NamedTuple

from engine.backends.vllm.core import VllmCore
from engine.cache.ids import TokenId
from engine.peft import read_files
from engine.refusal import StartRefused

LOAD_SECONDS = 300.0


class TakenAdapter(NamedTuple):
    digest: str
    rank: int
    num_bytes: int
    invocation: tuple[TokenId, ...] = ()


class VllmAdapters:
    def __init__(self, core: VllmCore, event_loop: asyncio.AbstractEventLoop) -> None:
        self._core = core
        self._event_loop = event_loop
        self._copies = TemporaryDirectory(prefix="holdfast-adapters-")
        self._taken: set[str] = set()

    def read(self, directory: Path) -> TakenAdapter:
        """Have vLLM take an adapter. Raise StartRefused. Not called on the event loop's thread."""
        files = read_files(directory)
        if files.invocation:
            raise StartRefused("`alora_invocation_tokens`: vLLM has no activated LoRA")
        if files.digest not in self._taken:
            copy = Path(self._copies.name, files.digest)
            try:
                files.write(copy)
                self._take(files.digest, copy)
            except (OSError, StartRefused) as error:
                rmtree(copy, ignore_errors=True)
                raise StartRefused(f"{error}") from error
            self._taken.add(files.digest)
        return TakenAdapter(files.digest, files.max_rank, len(files.weights))

    def _take(self, digest: str, copy: Path) -> None:
        adding = self._core.add_adapter(digest, str(copy))
        taking = asyncio.run_coroutine_threadsafe(adding, self._event_loop)
        try:
            taking.result(LOAD_SECONDS)
        except TimeoutError:
            taking.cancel()
            raise StartRefused(f"vLLM has not taken it in {LOAD_SECONDS:g} s") from None

    def hold(self, digest: str) -> None:
        """vLLM has it already."""

    def let_go(self, digest: str) -> None:
        self._taken.discard(digest)
        rmtree(Path(self._copies.name, digest), ignore_errors=True)
        asyncio.run_coroutine_threadsafe(self._core.remove_adapter(digest), self._event_loop)

    def close(self) -> None:
        self._copies.cleanup()
