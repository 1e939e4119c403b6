"""Finds engines: the endpoints of a Kubernetes service, or the addresses of a name.

A source reports the whole set after each change. While it can't be asked, the engines stay as they
are. A new engine is used when it is ready. An engine that leaves gets no new turns, and is
forgotten when its last turn has ended.
"""

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncGenerator, Iterable
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import parse_qsl, urlsplit

import aiohttp
import msgspec
from msgspec import Meta

from engine.supervisor import Supervisor
from gateway.base.background import pause
from gateway.base.errors import GatewayError, InvalidRequest
from gateway.base.logs import get_logger
from gateway.base.settings import ENGINE_NAME_CHARACTERS, EnginePlace, is_source
from gateway.routing.fleet import Fleet

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
WATCH_SECONDS = 240
"""How long one watch lasts. The API server says something at least every minute."""
_LIST = aiohttp.ClientTimeout(total=60)
_WATCH = aiohttp.ClientTimeout(total=None, connect=30, sock_read=WATCH_SECONDS + 60)
_MAX_LINE_BYTES = 1 << 22
_DNS_SECONDS = 5.0
_ONCE_SECONDS = 10.0
_SETTLE_SECONDS = 1.0
_FIRST_RETRY_SECONDS = 0.5
_MAX_RETRY_SECONDS = 30.0


class SourceFailed(GatewayError):
    """A source can't be asked now which engines there are."""


@dataclass(frozen=True, slots=True)
class ListedEngine:
    """An engine that a source reports."""

    place: EnginePlace
    # Whether it still serves and will be gone soon.
    is_leaving: bool = False


class _Endpoint(msgspec.Struct, frozen=True, rename="camel"):
    addresses: Annotated[list[str], Meta(min_length=1)]
    conditions: dict[str, bool | None] | None = None
    target_ref: dict[str, str] | None = None


class _Slice(msgspec.Struct, frozen=True):
    metadata: dict[str, Any]
    endpoints: list[_Endpoint] | None = None
    ports: list[dict[str, Any]] | None = None


class _Slices(msgspec.Struct, frozen=True):
    metadata: dict[str, Any]
    items: list[_Slice]


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


@dataclass(slots=True)
class EndpointSlices:
    """The endpoints of one service, by list and watch of `discovery.k8s.io/v1`."""

    api: str
    namespace: str
    service: str
    # The name of the port; empty for the first one.
    port: str = ""
    # The path of the engines' URLs.
    path: str = ""
    # The folder of a service account's files. Without a token in it the API is called without a
    # key, as `kubectl proxy` allows.
    account: Path = ACCOUNT
    _slices: dict[str, _Slice] = field(default_factory=dict)

    async def changes(self) -> AsyncGenerator[list[ListedEngine]]:
        """Yield all engines, at once and after each change, until the connection ends. Raise
        SourceFailed where the source can't be asked."""
        try:
            authority = self.account / "ca.crt"
            context = ssl.create_default_context(cafile=authority if authority.exists() else None)
            connector = aiohttp.TCPConnector(ssl=context)
            async with aiohttp.ClientSession(
                connector=connector, read_bufsize=_MAX_LINE_BYTES
            ) as http:
                version = await self._list(http)
                yield self._listed()
                async with aclosing(self._watch(http, version)) as changes:
                    async for _ in changes:
                        yield self._listed()
        except (aiohttp.ClientError, OSError, ValueError, KeyError) as error:
            raise SourceFailed(f"{type(error).__name__}: {error}"[:200]) from None

    async def _list(self, http: aiohttp.ClientSession) -> str:
        """Take in all slices; return their version."""
        async with self._get(http, _LIST) as response:
            slices = msgspec.json.decode(await response.read(), type=_Slices)
        self._slices = {item.metadata["name"]: item for item in slices.items}
        return str(slices.metadata["resourceVersion"])

    async def _watch(self, http: aiohttp.ClientSession, version: str) -> AsyncGenerator[None, None]:
        """Take in the changes after a version, and yield after each."""
        while True:  # a watch ends after a while, and the next one goes on after its last event
            query = {
                "watch": "1",
                "resourceVersion": version,
                "allowWatchBookmarks": "true",
                "timeoutSeconds": str(WATCH_SECONDS),
            }
            async with self._get(http, _WATCH, query) as response:
                async for line in response.content:
                    version = self._take(line)
                    yield

    def _take(self, line: bytes) -> str:
        """Take in one event; return its version. Raise SourceFailed where the watch has failed."""
        event = msgspec.json.decode(line, type=_Event)
        if event.type == "ERROR":  # for example because the version is too old: list anew
            text = bytes(event.object)[:160]
            raise SourceFailed(f"the watch ended: {text!r}")
        piece = msgspec.json.decode(event.object, type=_Slice)
        if event.type == "DELETED":
            self._slices.pop(piece.metadata["name"], None)
        elif event.type != "BOOKMARK":
            self._slices[piece.metadata["name"]] = piece
        return str(piece.metadata["resourceVersion"])

    def _get(
        self,
        http: aiohttp.ClientSession,
        timeout: aiohttp.ClientTimeout,
        options: dict[str, str] | None = None,
    ) -> Any:
        token = self.account / "token"  # it is read for each call, because it changes
        headers = {"authorization": f"Bearer {token.read_text().strip()}"} if token.exists() else {}
        query = {"labelSelector": f"kubernetes.io/service-name={self.service}", **(options or {})}
        url = f"{self.api}/apis/discovery.k8s.io/v1/namespaces/{self.namespace}/endpointslices"
        return http.get(url, params=query, headers=headers, timeout=timeout, raise_for_status=True)

    def _listed(self) -> list[ListedEngine]:
        """The engines of all slices, each address once. An endpoint that moves between slices is in
        both for a moment."""
        places: dict[str, ListedEngine] = {}
        for piece in self._slices.values():
            port = self._port_of(piece)
            if port is None:
                continue
            for endpoint in piece.endpoints or ():
                place = place_at(endpoint.addresses[0], port, self.path)
                target = (endpoint.target_ref or {}).get("name", "")
                if 0 < len(target) <= ENGINE_NAME_CHARACTERS:
                    place = EnginePlace(target, place.url)
                is_leaving = (endpoint.conditions or {}).get("terminating") or False
                earlier = places.get(place.url)
                if earlier is None or earlier.is_leaving:
                    places[place.url] = ListedEngine(place, is_leaving)
        return list(places.values())

    def _port_of(self, piece: _Slice) -> int | None:
        for port in piece.ports or ():
            if self.port in ("", port.get("name")) and port.get("port"):
                return int(port["port"])
        return None


@dataclass(frozen=True, slots=True)
class Addresses:
    """All addresses of a name, as a headless service has them. They are looked up every five
    seconds."""

    host: str
    port: int
    path: str = ""

    async def changes(self) -> AsyncGenerator[list[ListedEngine]]:
        """As `EndpointSlices.changes`."""
        loop = asyncio.get_running_loop()
        while True:
            try:
                addresses = await loop.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
            except OSError as error:
                raise SourceFailed(f"{self.host}: {error}") from None
            hosts = dict.fromkeys(str(address[4][0]) for address in addresses)
            yield [ListedEngine(place_at(host, self.port, self.path)) for host in hosts]
            await asyncio.sleep(_DNS_SECONDS)


async def places_now(entries: Iterable[str]) -> list[EnginePlace]:
    """The places of the engines of HOLDFAST_ENGINES: the listed ones, and those that its sources
    report now. Raise SourceFailed."""
    places = []
    for entry in entries:
        if not is_source(entry):
            places.append(EnginePlace.parse(entry))
            continue
        try:
            async with (
                asyncio.timeout(_ONCE_SECONDS),
                aclosing(source_of(entry).changes()) as changes,
            ):
                listed = await anext(changes)
        except (SourceFailed, TimeoutError) as error:
            raise SourceFailed(f"HOLDFAST_ENGINES: {entry.partition('?')[0]}: {error}") from None
        places += [engine.place for engine in listed]
    return places


def place_at(host: str, port: int, path: str) -> EnginePlace:
    return EnginePlace.parse(f"http://{f'[{host}]' if ':' in host else host}:{port}{path}")


def source_of(entry: str) -> EndpointSlices | Addresses:
    """The source that an entry of HOLDFAST_ENGINES names; the entry must be one (`is_source`)."""
    parts = urlsplit(entry)
    if parts.scheme == "dns":
        return Addresses(parts.hostname or "", parts.port or 0, parts.path)
    service, _, path = parts.path.removeprefix("/").partition("/")
    service, _, port = service.partition(":")
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "kubernetes.default")
    inside = f"https://{f'[{host}]' if ':' in host else host}"
    inside += f":{os.environ.get('KUBERNETES_SERVICE_PORT', '443')}"
    return EndpointSlices(
        api=dict(parse_qsl(parts.query)).get("api", inside),
        namespace=parts.netloc,
        service=service,
        port=port,
        path=f"/{path}" if path else "",
    )


class Follower:
    """Keeps the engines of one source in the fleet. An engine that an operator removed stays away
    for as long as the source reports it."""

    def __init__(self, fleet: Fleet, entry: str) -> None:
        self._fleet = fleet
        self._source = source_of(entry)
        self._listed: dict[str, ListedEngine] = {}
        self._ours: set[str] = set()
        self._leaving: set[str] = set()
        self._log = get_logger("discovery").bind(source=entry.partition("?")[0])

    async def follow(self, stopping: asyncio.Event) -> None:
        """Take in the source's engines, and ask it anew after every break."""
        seconds = _FIRST_RETRY_SECONDS
        while not stopping.is_set():
            try:
                async with aclosing(self._source.changes()) as changes:
                    async for listed in changes:
                        self._listed = {engine.place.url: engine for engine in listed}
                        seconds = _FIRST_RETRY_SECONDS
            except SourceFailed as error:
                self._log.warning("engines_not_told", error=str(error))
            await pause(stopping, seconds)
            seconds = min(seconds * 2, _MAX_RETRY_SECONDS)

    async def settle(self, stopping: asyncio.Event) -> None:
        """Bring the fleet nearer to the source's last list, again and again."""

        async def add(place: EnginePlace) -> None:
            try:
                engine = await self._fleet.add(place.url, place.name, stays=True)
            except InvalidRequest as error:  # it is tried again
                self._log.info("engine_not_added", url=place.url, error=str(error))
                return
            self._ours.add(engine.url)
            self._log.info("engine_added", engine=engine.name, url=engine.url)

        while not stopping.is_set():
            listed = self._listed
            ours = [engine for engine in self._fleet.engines if engine.url in self._ours]
            for engine in ours:
                listed_engine = listed.get(engine.url)
                is_leaving = listed_engine is None or listed_engine.is_leaving
                if is_leaving != (engine.url in self._leaving):
                    self._leaving ^= {engine.url}
                    engine.is_draining = is_leaving
                    event = "engine_drains" if engine.is_draining else "engine_resumed"
                    self._log.info(event, engine=engine.name, url=engine.url)
                if listed_engine is None and not engine.load.num_running:
                    await self._fleet.remove(engine.name)
                    self._log.info("engine_removed", engine=engine.name, url=engine.url)
            here = {engine.url for engine in self._fleet.engines}
            self._ours &= here | listed.keys()
            self._leaving &= here
            urls = self._ours | here
            new = [
                entry.place
                for entry in listed.values()
                if not entry.is_leaving and entry.place.url not in urls
            ]
            await asyncio.gather(*map(add, new))
            await pause(stopping, _SETTLE_SECONDS)


def follow_sources(
    stack: AsyncExitStack, entries: Iterable[str], fleet: Fleet, supervisor: Supervisor
) -> None:
    """Follow the sources among these entries of HOLDFAST_ENGINES until the stack's end."""
    for entry in filter(is_source, entries):
        follower = Follower(fleet, entry)
        for kind, loop in (("find", follower.follow), ("settle", follower.settle)):
            supervisor.start(f"{kind} {entry}", loop, kind)
            stack.push_async_callback(supervisor.stop, f"{kind} {entry}", 0)
