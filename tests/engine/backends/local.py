"""The real backend over a runner that computes nothing."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from datetime import date
from functools import partial
from typing import Any
from unittest.mock import patch
from uuid import uuid4

from engine.approximate.asking import Approximations
from engine.backends import local
from engine.backends.base import Parts
from engine.backends.local import LocalBackend
from engine.backends.prepare import pool
from engine.backends.prepare.pool import PreparePool
from engine.backends.prepare.prepared import Answer, Job, Kind
from engine.backends.prepare.preparer import Preparer
from engine.backends.prepare.process import WorkerProcess
from engine.backends.prepare.renderers import chat_renderer, chat_worker
from engine.backends.synthetic import SyntheticRunner
from engine.clock import ManualClock
from engine.protocol import Done, GenerateRequest, Message, Prompt, Sampling, Started, TextPart
from engine.protocol.reports import Description
from engine.settings import DEMO_MODEL, Settings
from engine.text.rendered import KnownDays
from engine.text.renderer import ChatRenderer

SCOPE = "a" * 32


async def finish(engine: LocalBackend, turn: GenerateRequest) -> Started:
    """Ask for an answer, and read all of it. Return its first frame."""
    frames = [frame async for frame in await engine.open(turn)]
    assert isinstance(frames[0], Started) and isinstance(frames[-1], Done)
    return frames[0]


def description(**changes: Any) -> Description:
    fields: dict[str, Any] = {
        "backend": "native",
        "model": "demo",
        "epoch": "",
        "max_context_tokens": 8192,
        "block_size": 16,
        "num_blocks": 2048,
        "granularity": 1,
        "min_cache_tokens": 1,
        "capabilities": ["copy_on_write", "tools", "thinking"],
    }
    return Description(**fields | changes)


def prompt(*texts: str, system: tuple[str, ...] = (), **fields: Any) -> Prompt:
    """Turns of the user and the assistant, one text each."""
    turns = [
        Message("assistant" if index % 2 else "user", [TextPart(text)])
        for index, text in enumerate(texts)
    ]
    return Prompt(turns, system=[TextPart(text) for text in system], **fields)


def request(of: Prompt | str = "hello", **changes: Any) -> GenerateRequest:
    fields: dict[str, Any] = {
        "request_id": uuid4().hex,
        "scope": SCOPE,
        "prompt": prompt(of) if isinstance(of, str) else of,
        "sampling": Sampling(max_tokens=2),
    }
    return GenerateRequest(**fields | changes)


class WorkerThread(WorkerProcess):
    """For a renderer that no other process can load. Nothing ends it but its work."""

    def __init__(self, preparer: Preparer) -> None:
        self._preparer = preparer
        self._work: asyncio.Task[Answer] | None = None

    @property
    def has_started(self) -> bool:
        return True

    async def ready(self) -> Any:
        """It always is."""

    async def run(self, kind: Kind, body: bytes, days: KnownDays | None = None) -> Answer:
        job = Job(kind, body, days)
        self._work = asyncio.create_task(asyncio.to_thread(self._preparer.answer, job))
        return await asyncio.shield(self._work)

    async def recover(self) -> None:
        if self._work is not None:
            await asyncio.wait([self._work])

    async def close(self) -> None:
        """Its thread ends with its work."""


def thread_pool(renderer: Any, _spec: Any, description: Description, *_: Any) -> PreparePool:
    """In the place of `new_pool`."""
    worker = partial(WorkerThread, Preparer(renderer, description))
    return PreparePool(worker, max_workers=1, max_waiting=100, wait_seconds=60)


@asynccontextmanager
async def serving(
    renderer: ChatRenderer | None = None,
    *,
    described: dict[str, Any] | None = None,
    bounds: dict[str, Any] | None = None,
    today: Any = date.today,
    approximate: Approximations | None = None,
    crashes: list[BaseException] | None = None,
    **changes: Any,
) -> AsyncIterator[LocalBackend]:
    """With worker processes, or with another `renderer` in a thread. `bounds` are the pool's.

    Where `crashes` are given it may crash.
    """
    values = {"secret": "s" * 16, "model": DEMO_MODEL, **changes}
    settings = Settings.model_validate(values)
    runner = SyntheticRunner(
        prefill_seconds=0, decode_seconds=0, copy_seconds=0, sleep=lambda _seconds: None
    )
    parts = Parts(
        runner=runner,
        renderer=renderer or chat_renderer(chat_worker(settings)),
        description=description(**described or {}),
        step_tokens=4096,
        block_bytes=1,
        worker=chat_worker(settings),
        approximate=approximate or Approximations(),
    )
    unforeseen: list[BaseException] = []
    on_crash = (unforeseen if crashes is None else crashes).append
    clock = ManualClock()
    backend = LocalBackend(settings, clock, lambda *_: parts, on_crash, today)
    seconds = {"PREPARE_SECONDS": 60.0, "WAIT_SECONDS": 60.0, **(bounds or {})}
    new_pool = local.new_pool if renderer is None else thread_pool
    with patch.multiple(pool, **seconds), patch.object(local, "new_pool", new_pool):
        await asyncio.to_thread(backend.load, lambda _stage, _fraction: None)
    try:
        yield backend
    finally:
        await backend.stop()
    assert not unforeseen
