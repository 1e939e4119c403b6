"""The pool of one engine, by its settings."""

import os
from functools import partial

import msgspec

from engine.backends.base import Body, Renderer
from engine.backends.prepare.pool import PreparePool
from engine.backends.prepare.prepared import Prepared, RequestLimits, Start, WorkerSpec
from engine.backends.prepare.preparer import Preparer
from engine.backends.prepare.process import WorkerProcess
from engine.backends.prepare.session_days import SessionDays
from engine.backends.prepare.thread import WorkerThread
from engine.protocol import Description, GenerateRequest
from engine.settings import Settings

MAX_DEFAULT_WORKERS = 4
PREPARE_SECONDS = 8.0
"""Seconds that preparing one prompt may take; then it is refused."""
WAIT_SECONDS = 5.0
"""Seconds that a prompt may wait for a worker."""
MEMORY_BYTES = 2 * 2**30
"""Memory that preparing one prompt may take."""
LIMITS = RequestLimits(
    segments=100_000, stops=1024, schema_bytes=256 * 1024, schema_properties=1024
)
"""Of one request: tools, system blocks and message parts; stop strings; and the schemas that one
output is bound to, by their JSON and their properties."""
_decode = msgspec.json.Decoder(GenerateRequest)


def new_preparation(
    renderer: Renderer,
    spec: WorkerSpec | None,
    description: Description,
    settings: Settings,
    days: SessionDays,
) -> PreparePool:
    """Worker processes, or one thread where the renderer can't be loaded by another process."""
    keeps_days = renderer.writes_date and settings.template_date == "session"
    if spec is None:
        preparer = Preparer(renderer, description, LIMITS)
        return PreparePool(
            lambda: WorkerThread(preparer),
            max_workers=1,
            max_waiting=settings.max_waiting,
            wait_seconds=WAIT_SECONDS,
            days=days if keeps_days else None,
        )
    start = Start(
        spec=spec,
        description=description,
        limits=LIMITS,
        memory_bytes=MEMORY_BYTES,
        seconds=PREPARE_SECONDS,
    )
    return PreparePool(
        partial(WorkerProcess, start),
        max_workers=settings.prepare_workers or default_workers(),
        max_waiting=settings.max_waiting,
        wait_seconds=WAIT_SECONDS,
        days=days if keeps_days else None,
    )


def default_workers() -> int:
    """One for each core, two at least: one scope may have all but one of them."""
    return max(2, min(os.cpu_count() or 1, MAX_DEFAULT_WORKERS))


def chat_worker(settings: Settings) -> WorkerSpec:
    """How a worker loads the model's renderer."""
    return WorkerSpec(
        kind="chat",
        model=settings.model,
        tool_format=settings.tool_format,
        reasoning_format=settings.reasoning_format,
        template_date=settings.template_date,
    )


def as_json(body: Body) -> bytes:
    return body if isinstance(body, bytes) else msgspec.json.encode(body)


def decode_prepared(prepared: Prepared) -> GenerateRequest:
    return _decode.decode(prepared.request)
