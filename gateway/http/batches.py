"""/v1/messages/batches: create, list, get, cancel, delete, and results as JSON lines."""

import asyncio
import secrets
import zlib
from collections.abc import AsyncGenerator
from datetime import timedelta
from functools import partial
from typing import Annotated

import msgspec
from litestar import Controller, delete, get, post
from litestar.di import NamedDependency
from litestar.params import FromPath, QueryParameter, RawBody
from litestar.response.base import ASGIResponse
from litestar.response.streaming import ASGIStreamingResponse
from msgspec import Raw

from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic import response as wire
from gateway.http.auth import KeyAuth
from gateway.http.batch_runner import ranked
from gateway.http.generation import KeyRequest, answered, header_mark_of, while_present
from gateway.http.model_calls import check_attribution, check_version
from gateway.http.query import check_query
from gateway.http.services import Services, services_of
from gateway.ledger.batches import PENDING, Batch

_PAGE = 100
_ENDS = ("succeeded", "errored", "canceled", "expired")
ResultRow = tuple[int, str, bytes]
"""A row's position, its custom id and its compressed result."""
_encode = msgspec.json.Encoder().encode


class BatchesController(Controller):
    path = "/v1/messages/batches"
    middleware = (KeyAuth,)
    before_request = staticmethod(check_query)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        check_attribution(request)
        return answered(await while_present(request.scope, _create(request, body)))

    @get()
    async def list_batches(
        self,
        request: KeyRequest,
        services: NamedDependency[Services],
        after_id: Annotated[str | None, QueryParameter(name="after_id")] = None,
        before_id: Annotated[str | None, QueryParameter(name="before_id")] = None,
        limit: Annotated[int, QueryParameter(name="limit", ge=1, le=1000)] = 20,
    ) -> ASGIResponse:
        """The workspace's batches, the newest first."""
        workspace = request.user.workspace
        store = services.batches
        if after_id is not None and before_id is not None:
            raise InvalidRequest("after_id: excludes before_id")
        async with services.reads["store"].taken(workspace):
            after = await store.get(workspace, after_id) if after_id is not None else None
            before = await store.get(workspace, before_id) if before_id is not None else None
            page_rows = await store.page(workspace, limit + 1, after=after, before=before)
            page = page_rows[-limit:] if before is not None else page_rows[:limit]
            answers = await _answers(services, request, page)
        return answered(
            wire.MessageBatchList(
                data=answers,
                has_more=len(page_rows) > limit,
                first_id=page[0].id if page else None,
                last_id=page[-1].id if page else None,
            )
        )

    @get("/{batch_id:str}")
    async def get_batch(self, request: KeyRequest, batch_id: FromPath[str]) -> ASGIResponse:
        services = services_of(request)
        workspace = request.user.workspace
        async with services.reads["store"].taken(workspace):
            batch = await services.batches.get(workspace, batch_id)
            return answered((await _answers(services, request, [batch]))[0])

    @post("/{batch_id:str}/cancel", status_code=200)
    async def cancel(self, request: KeyRequest, batch_id: FromPath[str]) -> ASGIResponse:
        services = services_of(request)
        workspace = request.user.workspace
        async with services.reads["store"].taken(workspace):
            batch = await services.batches.cancel(workspace, batch_id, services.clock.wall())
            return answered((await _answers(services, request, [batch]))[0])

    @delete("/{batch_id:str}", status_code=200)
    async def remove(self, request: KeyRequest, batch_id: FromPath[str]) -> ASGIResponse:
        services = services_of(request)
        workspace = request.user.workspace
        async with services.reads["store"].taken(workspace):
            await services.batches.remove(workspace, batch_id)
        return answered(wire.DeletedBatch(id=batch_id))

    @get("/{batch_id:str}/results")
    async def results(self, request: KeyRequest, batch_id: FromPath[str]) -> ASGIResponse:
        """The results, in the order of the rows."""
        services = services_of(request)
        workspace = request.user.workspace
        async with services.reads["store"].taken(workspace):
            batch = await services.batches.get(workspace, batch_id)
        if batch.status != "ended":
            raise InvalidRequest("message_batch_id: the batch is processing, it has no results yet")

        async def page_after(position: int) -> list[ResultRow]:
            async with services.reads["store"].taken(workspace):
                return await services.batches.results(batch.id, position, _PAGE)

        async def lines(page: list[ResultRow]) -> AsyncGenerator[bytes, None]:
            """Pages of lines. If the database goes away the stream is cut, which clients notice."""
            while page:
                yield await asyncio.to_thread(_encoded, page)
                page = await page_after(page[-1][0])

        # The first page is read before the stream begins, so that an outage is a plain error.
        page = await page_after(-1)
        return ASGIStreamingResponse(iterator=lines(page), media_type="application/x-jsonl")


async def _create(request: KeyRequest, body: bytes) -> wire.MessageBatch:
    services = services_of(request)
    principal = request.user
    header_mark_of(request, is_taken=False)
    version = check_version(request.headers.get("anthropic-version"))
    items, num_bytes = await services.workers.run(
        principal.workspace,
        len(body),
        partial(ranked, services, body, principal, version),
        line="new batches",
    )
    now = services.clock.wall()
    batch = Batch(
        id=f"msgbatch_{secrets.token_hex(12)}",
        workspace_id=principal.workspace,
        key_id=principal.key_id,
        version=version,
        status="in_progress",
        num_bytes=num_bytes,
        created_at=now,
        expires_at=now + timedelta(seconds=services.bounds.batch_seconds),
    )
    async with services.reads["store"].taken(principal.workspace):
        await services.batches.create(batch, items)
    return _message_batch(request, batch, {PENDING: len(items)})


def _encoded(page: list[ResultRow]) -> bytes:
    lines = [
        _encode(wire.ResultLine(custom_id, Raw(zlib.decompress(result)))) + b"\n"
        for _, custom_id, result in page
    ]
    return b"".join(lines)


async def _answers(
    services: Services, request: KeyRequest, page: list[Batch]
) -> list[wire.MessageBatch]:
    counts = await services.batches.counts([batch.id for batch in page])
    return [_message_batch(request, batch, counts.get(batch.id, {})) for batch in page]


def _message_batch(request: KeyRequest, batch: Batch, counts: dict[str, int]) -> wire.MessageBatch:
    has_ended = batch.status == "ended"
    base = str(request.base_url).rstrip("/")
    return wire.MessageBatch(
        id=batch.id,
        processing_status=batch.status,
        request_counts=wire.RequestCounts(
            processing=counts.get(PENDING, 0), **{status: counts.get(status, 0) for status in _ENDS}
        ),
        created_at=batch.created_at,
        expires_at=batch.expires_at,
        ended_at=batch.ended_at,
        cancel_initiated_at=batch.cancel_initiated_at,
        results_url=f"{base}/v1/messages/batches/{batch.id}/results" if has_ended else None,
    )
