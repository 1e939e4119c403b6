"""POST, GET, PATCH and DELETE of /v1beta/cachedContents, also under /v1.

A cached content is a lease with its own name and lifetime. A turn without output creates it: an
engine computes the prompt and holds it. Another such turn extends its lifetime by reading it. The
row in the database outlives gateways and engines. If an engine has lost the prompt, the next
request that uses it writes it again, for the time that remains.
"""

import re
import secrets
import zlib
from collections.abc import Sequence
from datetime import timedelta

import msgspec
from litestar import Controller, delete, get, patch, post
from litestar.params import FromPath, RawBody
from litestar.response.base import ASGIResponse
from msgspec import UNSET, UnsetType

from engine.protocol import Started, Ttl
from gateway.base.catalogue import CatalogueModel
from gateway.base.errors import EngineFailed, InvalidRequest
from gateway.dialects.collector import Findings, Holdfast, extension_of
from gateway.dialects.gemini import response as caches
from gateway.dialects.gemini.lower import HeldContent, ask_of
from gateway.dialects.gemini.request import (
    Content,
    CreateRequest,
    GenerateRequest,
    GenerationConfig,
    Part,
    Prompted,
    decode_create,
    decode_update,
    expiry_of,
    reduced,
)
from gateway.http.auth import KeyAuth
from gateway.http.bodies import brought_in
from gateway.http.generation import KeyRequest, answered, header_mark_of, while_present
from gateway.http.query import check_query
from gateway.http.services import services_of
from gateway.ledger.cached_contents import CachedContent
from gateway.prompt.ask import Ask
from gateway.turn.state import Accepted, Whole

_PREFIX = "cachedContents/"
_DEFAULT_SECONDS = 3600.0
_SHORT_SECONDS = 300.0
_MAX_PAGE = 1000
_PAGE = 100
_COMPRESSION = 1
_ID = re.compile("[0-9a-f]{24}")
_encode = msgspec.json.Encoder().encode
_prompted = msgspec.json.Decoder(Prompted)


class CachedContentsController(Controller):
    path = "/v1beta/cachedContents"
    middleware = (KeyAuth,)
    before_request = staticmethod(check_query)

    @post(status_code=200)
    async def create(self, request: KeyRequest, body: RawBody) -> ASGIResponse:
        return answered(await while_present(request.scope, _create(request, body)))

    @get()
    async def list_contents(self, request: KeyRequest) -> ASGIResponse:
        services = services_of(request)
        query = request.query_params
        size = min(int(query.get("pageSize", _PAGE)), _MAX_PAGE)
        after = query.get("pageToken", "")
        now = services.clock.wall()
        if after and _ID.fullmatch(after) is None:
            raise InvalidRequest("pageToken: must be the nextPageToken of an answer")
        workspace = request.user.workspace
        async with services.reads["store"].taken(workspace):
            contents = await services.cached_contents.page(workspace, after, size + 1, now)
        page = contents[:size]
        return answered(
            caches.CachedContentList(
                cached_contents=[_answer(content) for content in page] or UNSET,
                next_page_token=page[-1].id if len(contents) > size else UNSET,
            )
        )

    @get("/{content_id:str}")
    async def get_content(self, request: KeyRequest, content_id: FromPath[str]) -> ASGIResponse:
        return answered(_answer(await _find(request, content_id)))

    @patch("/{content_id:str}")
    async def update(
        self, request: KeyRequest, content_id: FromPath[str], body: RawBody
    ) -> ASGIResponse:
        return answered(await while_present(request.scope, _update(request, content_id, body)))

    @delete("/{content_id:str}", status_code=200)
    async def remove(self, request: KeyRequest, content_id: FromPath[str]) -> ASGIResponse:
        """Remove it. Its lease ends at once, unless another cached content has the same prompt."""
        services = services_of(request)
        content = await _find(request, content_id)
        now = services.clock.wall()
        async with services.reads["store"].taken(request.user.workspace):
            # The row expires first. If the gateway dies after that, the sweep ends the lease.
            await services.cached_contents.move_expiry(content, now, content.held_until, now)
            await services.sweep.end([content])
        return answered(caches.Nothing())


class CachedContentsAtV1Controller(CachedContentsController):
    path = "/v1/cachedContents"


async def held_by(
    request: KeyRequest, name: str | None, model: CatalogueModel, field: str = "cachedContent"
) -> tuple[HeldContent, int] | None:
    """The prompt of the cached content of this name, and its bytes. None without a name.

    `field` is where the request names it. Raise NotFound if there is no such content, and
    InvalidRequest if it is of another model.
    """
    if name is None:
        return None
    services = services_of(request)
    now = services.clock.wall()
    content, packed = await _with_body(request, name.removeprefix(_PREFIX))
    if content.model != model.id:
        raise InvalidRequest(
            f"{field}: is of models/{content.model}, the request asks for models/{model.id}"
        )
    prompted = await services.workers.run(
        request.user.workspace, content.num_bytes, _unpacked, packed
    )
    return _held(prompted, (content.expires_at - now).total_seconds()), content.num_bytes


async def _create(request: KeyRequest, body: bytes) -> caches.CachedContent:
    services = services_of(request)
    workspace = request.user.workspace
    now = services.clock.wall()

    def read() -> tuple[CreateRequest, list[str], bytes, int]:
        creation, left_out = decode_create(body, services.bounds)
        whole = _encode(creation.prompted)
        return creation, left_out, zlib.compress(whole, _COMPRESSION), len(whole)

    creation, left_out, packed, num_bytes = await services.workers.run(workspace, len(body), read)
    prompted = creation.prompted
    model = services.find_model(creation.model)
    expiry = expiry_of(creation, now, services.bounds.cached_content_seconds)
    if expiry is None:
        expiry = now + timedelta(seconds=_DEFAULT_SECONDS)
    async with services.reads["store"].taken(workspace):
        await services.cached_contents.check_room(workspace, num_bytes, now)
    holdfast, prefix = await _hold(request, model, prompted, num_bytes, expiry - now, left_out)
    content = CachedContent(
        id=secrets.token_hex(12),
        workspace_id=workspace,
        model=model.id,
        display_name=creation.display_name,
        num_bytes=num_bytes,
        num_tokens=holdfast.breakpoints[0].tokens or 0,
        prefix=prefix,
        created_at=now,
        updated_at=now,
        expires_at=expiry,
        held_until=expiry,
    )
    await services.cached_contents.create(content, packed)
    return msgspec.structs.replace(_answer(content), holdfast=holdfast)


async def _update(request: KeyRequest, content_id: str, body: bytes) -> caches.CachedContent:
    """Change when a cached content expires. A later expiry extends the lease at once. At an earlier
    one the sweep ends the lease."""
    services = services_of(request)
    workspace = request.user.workspace
    now = services.clock.wall()
    change = decode_update(body, services.bounds)
    expiry = expiry_of(change, now, services.bounds.cached_content_seconds)
    content, packed = await _with_body(request, content_id.removeprefix(_PREFIX))
    if expiry is None:
        raise InvalidRequest("ttl: is required, or expireTime: nothing else can be changed")
    holdfast: Holdfast | UnsetType = UNSET
    if expiry > content.held_until:
        model = services.find_model(content.model)
        prompted = await services.workers.run(workspace, content.num_bytes, _unpacked, packed)
        holdfast, _ = await _hold(request, model, prompted, content.num_bytes, expiry - now)
    held_until = max(expiry, content.held_until)
    await services.cached_contents.move_expiry(content, expiry, held_until, now)
    content = msgspec.structs.replace(content, expires_at=expiry, updated_at=now)
    return msgspec.structs.replace(_answer(content), holdfast=holdfast)


async def _hold(
    request: KeyRequest,
    model: CatalogueModel,
    prompted: Prompted,
    num_bytes: int,
    lifetime: timedelta,
    left_out: Sequence[str] = (),
) -> tuple[Holdfast, str]:
    """Run the turn that computes the prompt and holds it. Return the answer's extension, which has
    one breakpoint, and the prefix's name.

    `left_out` are the request's unknown fields. Raise InvalidRequest for a prompt that engines do
    not cache.
    """
    header_mark_of(request, is_taken=False)
    services = services_of(request)
    arrived = request.scope["state"]["arrived"]
    context = services.context_of(request.user, model, arrived)
    # Templates want a user's turn at the end. This one comes after what is held.
    warm_up = GenerateRequest(
        contents=[Content([Part(text=".")])], generation_config=GenerationConfig()
    )
    warm_up.generation_config.max_output_tokens = 0

    def make() -> Ask:
        content = _held(prompted, lifetime.total_seconds())
        return ask_of(reduced(warm_up, left_out), context, stream=False, held=content)

    ask = await services.workers.run(request.user.workspace, num_bytes, make)
    findings = Findings()
    started = None
    async for event in services.turns.run(ask, services.turns.new_id()):
        if isinstance(event, Accepted):
            findings = event.findings
        if isinstance(event, Whole):
            started = next((frame for frame in event.frames if isinstance(frame, Started)), None)
    breakpoint = ask.plan.deepest_breakpoint()
    if started is None or breakpoint is None:
        raise EngineFailed
    holdfast = extension_of(started, findings, ask.plan.paths)
    [report] = holdfast.breakpoints
    if report.state == "none":
        tokens = report.tokens or 0
        least = report.min_cache_tokens
        bound = f", and at least {least} are needed" if isinstance(least, int) else ""
        raise InvalidRequest(f"contents: can't be cached ({report.reason}): {tokens} tokens{bound}")
    return holdfast, breakpoint[0]


def _held(prompted: Prompted, seconds: float) -> HeldContent:
    ttl: Ttl = "5m" if seconds <= _SHORT_SECONDS else "1h"
    return HeldContent(prompted, ttl, seconds)


def _unpacked(packed: bytes) -> Prompted:
    return _prompted.decode(zlib.decompress(packed))


async def _find(request: KeyRequest, content_id: str) -> CachedContent:
    services = services_of(request)
    workspace = request.user.workspace
    now = services.clock.wall()
    async with services.reads["store"].taken(workspace):
        return await services.cached_contents.get(workspace, content_id, now)


async def _with_body(request: KeyRequest, content_id: str) -> tuple[CachedContent, bytes]:
    """As `_find`, with the compressed body. Its bytes count as if the request had sent them."""
    services = services_of(request)
    workspace = request.user.workspace
    content = await _find(request, content_id)
    await brought_in(request.scope, content.num_bytes)
    now = services.clock.wall()
    async with services.reads["store"].taken(workspace):
        return await services.cached_contents.with_body(workspace, content_id, now)


def _answer(content: CachedContent) -> caches.CachedContent:
    return caches.CachedContent(
        name=f"{_PREFIX}{content.id}",
        model=f"models/{content.model}",
        display_name=content.display_name or UNSET,
        create_time=content.created_at,
        update_time=content.updated_at,
        expire_time=content.expires_at,
        usage_metadata=caches.CacheUsage(total_token_count=content.num_tokens),
    )
