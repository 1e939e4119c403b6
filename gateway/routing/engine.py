"""The client of the engine protocol, and the known state of each engine.

Nothing here decides or retries. A lost connection, a silence, a broken frame and a refusal are one
typed error each.
"""

import asyncio
import math
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from typing import TypeVar
from urllib.parse import quote, urlencode

import msgspec
from xxhash import xxh3_64_intdigest

from engine.protocol import (
    EPOCH_HEADER,
    FIRST_TTLS,
    SCOPE_HEADER,
    AckRequest,
    CancelReply,
    CancelRequest,
    Capability,
    ChainHeld,
    CountReply,
    CountRequest,
    DropReply,
    DropRequest,
    ErrorReply,
    EventFrame,
    FinalCounts,
    GenerateRequest,
    LoadRequest,
    NamesRequest,
    PurgeReply,
    PurgeRequest,
    Started,
)
from engine.protocol.reports import AdapterInfo, Description, EntryInfo, Memory, Stats
from gateway.base.errors import (
    AnotherModel,
    EngineFailed,
    EngineLost,
    EngineSetWrong,
    EngineTimeout,
    GatewayError,
    NoEngineThere,
)
from gateway.base.logs import bound_request_id, get_logger
from gateway.routing.breaker import Breaker
from gateway.routing.client import (
    CannotConnect,
    EngineHttp,
    EngineResponse,
    Generation,
    Timeouts,
    are_sane,
    refusal,
)
from gateway.routing.epochs import EpochsSeen
from gateway.routing.held import WHOLE_BYTES, Holdings, PrefixIndex, SnapshotPart, frames_of
from gateway.routing.model_ids import Admitted
from gateway.routing.pending_purges import PendingPurges
from gateway.routing.router import Load, Route, Weights, kind_of
from gateway.structs.fleet import EngineStatus

Reply = TypeVar("Reply")

_CONNECT_SECONDS = 2.0
_CONTROL_SECONDS = 3.0
# The engine sends a blank line at least every 5 s; three missing ones are a silence.
_SILENCE_SECONDS = 16.0
_MAX_EVENT_BYTES = 256 << 20
_MAX_FAILURE_CHARACTERS = 500
_COUNT_SECONDS = 60.0
_PURGE_SECONDS = 60.0
REFUSED_PURGE_SECONDS = 30.0
"""The pause before an engine that refused a purge is asked again."""
ASK_SECONDS = 0.25
_CONTROL = Timeouts(_CONTROL_SECONDS, _CONNECT_SECONDS)
STREAM_TIMEOUTS = Timeouts(_SILENCE_SECONDS, _CONNECT_SECONDS)
_COUNT = Timeouts(_COUNT_SECONDS, _CONNECT_SECONDS)
# A purge waits for the store's files.
_PURGE = Timeouts(_PURGE_SECONDS, _CONNECT_SECONDS)

_encode = msgspec.json.Encoder().encode
_error = msgspec.json.Decoder(ErrorReply)


class _EventLines:
    """Puts the lines of an engine's events together from chunks."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._size = 0

    def feed(self, chunk: bytes) -> Iterator[bytes]:
        """The lines that end in this chunk, without empty ones. Raise EngineFailed for a line that
        is too long."""
        *ends, beginning = chunk.split(b"\n")
        for end in ends:
            line = b"".join([*self._parts, end])
            self._parts = []
            self._size = 0
            if line.strip():
                yield line
        self._parts.append(beginning)
        self._size += len(beginning)
        if self._size > _MAX_EVENT_BYTES:
            raise EngineFailed("the engine broke the protocol")


class Engine:
    """One engine: the calls of the protocol, and the engine's known state."""

    def __init__(
        self,
        name: str,
        url: str,
        secret: str,
        http: EngineHttp,
        *,
        weights: Weights | None = None,
        down_seconds: float = 0.0,
        monotonic: Callable[[], float] = time.monotonic,
        index: PrefixIndex | None = None,
        admit: Callable[[Description], Admitted] | None = None,
        purges: PendingPurges | None = None,
    ) -> None:
        """`admit` raises AnotherModel for a description under whose name another model is known.
        The engine does `purges` of its name before it is ready."""
        self.name = name
        self.seed = xxh3_64_intdigest(url)
        self.kind = kind_of(None)
        # What this gateway knows for routing.
        self.holdings = Holdings(index)
        self.load = Load((weights or Weights()).fade_seconds)
        self.breaker = Breaker()
        # All engines of the fleet, with this one.
        self.peers: Sequence[Engine] = ()
        self.monotonic = monotonic
        self.url = url
        self.status: EngineStatus = "starting"
        self.readiness: dict[str, object] = {}
        self.failure = ""
        """Why it failed, as it last reported; empty where it reported no failure."""
        self.description: Description | None = None
        self.last_description: Description | None = None
        """The engine's last description, whether it was admitted or not."""
        self.notes: list[str] = []
        self.fault: EngineFailed | None = None
        """What is wrong with the last poll's answer; None if it was sound or none came."""
        # A draining engine gets no new turns.
        self.is_draining = False
        self._down_seconds = down_seconds
        self._unsure_since: float | None = None
        # When a poll last found it ready.
        self.answered_at = -math.inf
        # When a poll last got any answer.
        self.heard_at: float | None = None
        self.last_stats: Stats | None = None
        self.epochs = EpochsSeen()
        self._was_down = False
        self._admit = admit or (lambda description: Admitted(description, []))
        self._purges = purges
        self.purge_refusal = ""
        """Why it refuses a pending purge; empty where it refuses none."""
        self._purge_again_at = -math.inf
        # The waits of turns for the engine to accept them.
        self._waits: set[asyncio.Timeout] = set()
        self._http = http
        self._headers = {"authorization": f"Bearer {secret}", "content-type": "application/json"}

    @property
    def is_ready(self) -> bool:
        return self.status == "ready"

    @property
    def answers_in(self) -> str | None:
        """The epoch in which it answers; None while it does not."""
        return self.description.epoch if self.is_ready and self.description else None

    @property
    def capabilities(self) -> frozenset[Capability]:
        return self.description.known_capabilities if self.description else frozenset()

    @property
    def is_isolated(self) -> bool:
        """Whether it promises to keep workspaces apart. An engine that reports no promises does."""
        return self.why_not_isolated is None

    @property
    def why_not_isolated(self) -> str | None:
        """Why it does not keep workspaces apart; None where it does."""
        promises = self.description.guarantees if self.description else []
        for promise in promises:
            if promise.name == "isolation" and not promise.is_kept:
                return promise.note
        return None

    @property
    def ttls(self) -> tuple[str, ...]:
        return self.description.ttls if self.description else FIRST_TTLS

    @property
    def takes_releases(self) -> bool:
        return self.description is not None and self.description.takes_releases

    async def generate(self, request: GenerateRequest) -> Generation:
        """Return when the engine's status line has come. Raise the error of a refusal, and
        EngineTimeout if `give_up` is called first."""
        headers = {SCOPE_HEADER: request.scope}
        if self.description is not None:
            headers[EPOCH_HEADER] = self.description.epoch
        wait = asyncio.timeout(None)
        self._waits.add(wait)
        try:
            response = await self._send(
                "POST", "/v1/generate", _encode(request), STREAM_TIMEOUTS, headers, wait
            )
        finally:
            self._waits.discard(wait)
        if response.status != 200:
            await self._refuse(response)
        return Generation(response, request.request_id)

    def give_up(self) -> None:
        """End the waits of turns that the engine has not accepted, because it does not answer."""
        for wait in self._waits:
            if not wait.expired():
                wait.reschedule(asyncio.get_running_loop().time())

    async def count(self, request: CountRequest) -> CountReply:
        headers = {SCOPE_HEADER: request.scope}
        return await self._call("POST", "/v1/count", CountReply, _encode(request), _COUNT, headers)

    async def cancel(self, request_id: str) -> bool:
        """Cancel a request; return whether it was running. An ended or unknown request is no
        error."""
        body = _encode(CancelRequest(request_id))
        return (await self._call("POST", "/v1/cancel", CancelReply, body)).cancelled

    async def ack(self, request_ids: list[str]) -> None:
        response = await self._send("POST", "/v1/ack", _encode(AckRequest(request_ids)), _CONTROL)
        if response.status not in (200, 204):
            await self._refuse(response)
        await response.read()

    async def unacknowledged(self) -> list[FinalCounts]:
        """The final counts that are not acknowledged. Impossible counts are left out, so that they
        do not hold up the others."""
        finals = await self._call("GET", "/v1/unacknowledged", list[FinalCounts])
        sane = [final for final in finals if are_sane(final)]
        if len(sane) < len(finals):
            number = len(finals) - len(sane)
            get_logger("engine").error("counts_not_sane", engine=self.name, number=number)
        return sane

    async def stats(self) -> Stats:
        return await self._call("GET", "/v1/stats", Stats)

    async def ask_names(self, digests: Sequence[str]) -> bool:
        """Ask which of these names the engine holds, and take the answer in. Return whether it
        holds any. The engine has ASK_SECONDS to answer."""
        body = _encode(NamesRequest(list(digests)))
        try:
            async with asyncio.timeout(ASK_SECONDS):
                chains = await self._call("POST", "/v1/names", list[ChainHeld], body)
        except TimeoutError:
            raise EngineTimeout from None
        self.holdings.hold(chains)
        return bool(chains)

    async def entries(self, scope: str | None = None, limit: int | None = None) -> list[EntryInfo]:
        """The live entries of one scope (hexadecimal), or of all; with `limit` only the largest."""
        return await self._entries({"scope": scope, "limit": limit})

    async def entries_after(self, scope: str, after: str, limit: int) -> list[EntryInfo]:
        """The live entries of a scope whose ids follow `after`, in the order of their ids. An
        engine of an earlier version reports all entries of the scope at once."""
        filters: dict[str, object] = {"scope": scope}
        if self.takes_releases:
            filters |= {"limit": limit, "after": after}
        entries = await self._entries(filters)
        later = [entry for entry in entries if entry.scope == scope and entry.entry > after]
        return sorted(later, key=lambda entry: entry.entry)[:limit]

    async def _entries(self, filters: Mapping[str, object]) -> list[EntryInfo]:
        query = urlencode({name: value for name, value in filters.items() if value is not None})
        return await self._call("GET", f"/v1/entries?{query}", list[EntryInfo])

    async def memory(self) -> Memory:
        return await self._call("GET", "/v1/memory", Memory)

    async def drop(self, scope: str, entry: str) -> bool:
        """Drop an entry of a scope for an operator; return whether there was one. It is gone when
        this returns."""
        body = _encode(DropRequest(scope, entry))
        return (await self._call("POST", "/v1/drop", DropReply, body)).dropped > 0

    async def release(self, scope: str, entry: str) -> bool:
        """As `drop`, for the workspace that has the scope. An engine of an earlier version counts
        it as an operator's drop."""
        if not self.takes_releases:
            return await self.drop(scope, entry)
        body = _encode(DropRequest(scope, entry, by="owner"))
        return (await self._call("POST", "/v1/drop", DropReply, body)).dropped > 0

    async def purge(self, scope: str | None) -> PurgeReply:
        """Remove a scope's content from the engine; with None remove all content."""
        body = _encode(PurgeRequest(scope))
        return await self._call("POST", "/v1/purge", PurgeReply, body, _PURGE)

    async def load_adapter(self, name: str) -> AdapterInfo:
        """Load the adapter in the folder of this name. The next poll sees it."""
        body = _encode(LoadRequest(name))
        return await self._call("POST", "/v1/adapters", AdapterInfo, body, _COUNT)

    async def unload_adapter(self, name: str) -> None:
        path = f"/v1/adapters/{quote(name, safe='')}"
        await self._call("DELETE", path, AdapterInfo)
        await self.poll()

    async def events(
        self, epoch: str | None, after: int
    ) -> AsyncGenerator[EventFrame | SnapshotPart, None]:
        """Follow the engine's events until it ends them. Raise the errors of every call.

        They begin after event `after` of that epoch. If the engine no longer has those, they begin
        with a snapshot.
        """
        path = "/v1/events" if epoch is None else f"/v1/events?epoch={epoch}&after={after}"
        response = await self._send("GET", path, None, STREAM_TIMEOUTS)
        try:
            if response.status != 200:
                await self._refuse(response)
            lines = _EventLines()
            async for chunk in response:
                for line in lines.feed(chunk):
                    if len(line) > WHOLE_BYTES:
                        await self.holdings.index.wait_turn()
                    for frame in frames_of(line):
                        yield frame
                        await self._wait_behind(frame)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise EngineFailed("the engine broke the protocol") from None
        finally:
            response.close()

    async def _wait_behind(self, frame: EventFrame | SnapshotPart) -> None:
        """Wait for this engine's turn before the next part of a snapshot, which is long work."""
        if isinstance(frame, SnapshotPart):
            await self.holdings.index.wait_turn()

    # What turns report about the engine.

    def assign(self, turn: str, route: "Route[Engine]", *, is_batch: bool, workspace: str) -> None:
        """Note that a turn goes to the engine, which has to compute `to_prefill` of its tokens."""
        now = self.monotonic()
        self.load.assign(turn, route.to_prefill, now, is_batch=is_batch, workspace=workspace)
        self.breaker.sent(turn, now)
        self.holdings.expect(route.expected, now)

    def started(self, turn: str, started: Started, names: Sequence[str]) -> None:
        """Note that the turn's first frame has come. `names` are the request's, in their order."""
        now = self.monotonic()
        self.breaker.answered()
        self.load.started(turn, started.usage.computed_tokens, now)
        self.holdings.learn(started, names, now)
        self.epochs.granted(started.epoch, started.leases_granted)

    def left(self, turn: str, route: "Route[Engine]", *, has_started: bool) -> None:
        """Note that the turn is over, however it ended. A second call does nothing."""
        self.load.ended(turn)
        self.breaker.left(turn)
        if not has_started:
            self.holdings.disappoint(route.expected)

    # What polls report about the engine.

    async def poll(self) -> None:
        """Ask whether the engine is ready, and take in its description. After a broken connection,
        ask once more: the engine may only have closed an idle one."""
        try:
            try:
                await self._look()
            except CannotConnect:
                raise
            except EngineLost:
                await self._look()
        except AnotherModel as error:
            self._refused(error)
        except GatewayError as error:
            self.fault = error if isinstance(error, EngineFailed) else None
            self._missed(error)
        else:
            self.fault = None

    async def _look(self) -> None:
        response = await self._send("GET", "/readyz", None, _CONTROL)
        body = await response.read()
        self.heard_at = self.monotonic()
        try:
            self.readiness = msgspec.json.decode(body, type=dict[str, object])
        except (msgspec.MsgspecError, UnicodeDecodeError):
            self.readiness = {}
        if response.status == 404:
            raise NoEngineThere
        if response.status == 200:
            earlier = self.description
            self.last_description = await self._call("GET", "/v1/describe", Description)
            new = self._take(self.last_description)
            self.kind = kind_of(new)
            # A new epoch is another process, so all knowledge of the old process is dropped.
            if earlier is None or earlier.epoch != new.epoch:
                self.holdings.index.has_gaps |= new.state_blocks > 0
                if self.holdings.epoch != new.epoch:
                    self.holdings.forget()
                self._reset_load()
                self.breaker.reset()
                self._purge_again_at = -math.inf
            await self._do_pending_purges()
            if self._was_down:
                get_logger("engine").info("engine_back", engine=self.name)
            self._was_down = False
            self.failure = ""
            self.answered_at = self.monotonic()
            self.status = "ready"
            self.epochs.answered(new, self.answered_at)
        else:
            self.status = "starting"
            self.failure = self._reported_failure()
            self.epochs.missed(self.monotonic())
        self._unsure_since = None

    def _reported_failure(self) -> str:
        """Why the engine failed, by its readiness report; empty where it did not."""
        if self.readiness.get("stage") != "failed":
            return ""
        return str(self.readiness.get("error") or "an error")[:_MAX_FAILURE_CHARACTERS]

    async def _do_pending_purges(self) -> None:
        """Have the engine do the purges that were asked for while it was away.

        Raise EngineLost and EngineTimeout; the engine is then not ready. An engine that refuses a
        purge still gets turns, and is asked again after a while.
        """
        if self._purges is None:
            return
        if not self.is_ready:
            # Another gateway may have been asked while this engine was away.
            await self._purges.look()
        elif self.monotonic() < self._purge_again_at:
            return
        self.purge_refusal = ""
        for purge in self._purges.of(self.name):
            try:
                reply = await self.purge(purge.scope)
            except (EngineLost, EngineTimeout):
                raise
            except GatewayError as error:
                self.purge_refusal = str(error)
                self._purge_again_at = self.monotonic() + REFUSED_PURGE_SECONDS
                get_logger("engine").warning(
                    "pending_purge_refused", engine=self.name, error=self.purge_refusal
                )
                return
            await self._purges.done(purge)
            get_logger("engine").info(
                "pending_purge_done",
                engine=self.name,
                workspace=purge.workspace,
                entries=reply.entries,
                files=reply.files,
                unpurged=reply.unpurged,
            )

    def _reset_load(self) -> None:
        """Set the load to the mean load of the ready engines that can do the same."""
        now = self.monotonic()
        recents = [
            peer.load.recent(now)
            for peer in self.peers
            if peer is not self and peer.is_ready and peer.kind == self.kind
        ]
        self.load.reset(sum(recents) / max(len(recents), 1), now)

    def _take(self, description: Description) -> Description:
        """Admit a description, without adapters whose ids belong to others. Raise AnotherModel."""
        new, notes = self._admit(description)
        if notes != self.notes:
            for note in notes:
                get_logger("engine").warning("adapter_refused", engine=self.name, why=note)
        self.notes = notes
        self.description = new
        return new

    def _refused(self, error: AnotherModel) -> None:
        """Refuse the engine. It gets no turn until the name of its model belongs to that model
        again."""
        reason = str(error)
        if self.fault is None or str(self.fault) != reason:
            get_logger("engine").error("engine_refused", engine=self.name, error=reason)
        self.fault = error
        self.status = "refused"
        self._unsure_since = None
        self._was_down = True
        self.readiness = {"error": reason}
        self.failure = ""
        self.notes = []

    def _missed(self, error: GatewayError) -> None:
        """Note that the engine did not answer. It is down after some time, or at once if it refuses
        connections, if its answer is wrong or if it was never ready."""
        now = self.monotonic()
        reason = str(error)
        self.epochs.missed(now)
        since = now if self._unsure_since is None else self._unsure_since
        self._unsure_since = since
        is_silent = isinstance(error, EngineTimeout | EngineLost)
        was_ready = self.status in ("ready", "unsure")
        if isinstance(error, CannotConnect) and error.is_refused:
            reason = "cannot connect"
        elif is_silent and was_ready and now - since < self._down_seconds:
            self.status = "unsure"
            self.readiness = {"error": reason}
            return
        elif isinstance(error, EngineSetWrong):
            reason = error.told_operator
        if self.failure:
            reason = f"it ended by an error, {self.failure}; now: {reason}"
        if self.status != "down":
            get_logger("engine").warning("engine_down", engine=self.name, error=reason)
        self.status = "down"
        self._unsure_since = None
        self._was_down = True
        self.readiness = {"error": reason}

    async def watch_load(self) -> None:
        """Learn how much the engine computed, for other gateways too."""
        try:
            stats = await self.stats()
            self.last_stats = stats
            self.epochs.counted(stats)
        except GatewayError:
            return  # the engine is busy: the next call may have an answer
        if self.description is not None and stats.epoch == self.description.epoch:
            self.load.observe(stats.counters.computed_tokens, self.monotonic())

    async def _call(
        self,
        method: str,
        path: str,
        kind: type[Reply],
        body: bytes | None = None,
        timeouts: Timeouts = _CONTROL,
        headers: Mapping[str, str] | None = None,
    ) -> Reply:
        response = await self._send(method, path, body, timeouts, headers)
        if response.status != 200:
            await self._refuse(response)
        try:
            return msgspec.json.decode(await response.read(), type=kind)
        except msgspec.MsgspecError:
            raise EngineFailed("the engine broke the protocol") from None

    async def _send(
        self,
        method: str,
        path: str,
        body: bytes | None,
        timeouts: Timeouts,
        headers: Mapping[str, str] | None = None,
        wait: asyncio.Timeout | None = None,
    ) -> EngineResponse:
        all_headers = self._headers if headers is None else {**self._headers, **headers}
        request_id = bound_request_id()
        if request_id is not None:
            all_headers = {**all_headers, "x-request-id": request_id}
        try:
            return await self._http.send(method, self.url + path, all_headers, body, timeouts, wait)
        except CannotConnect as error:
            self._missed(error)
            raise

    async def _refuse(self, response: EngineResponse) -> None:
        try:
            reply = _error.decode(await response.read())
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise EngineFailed("the engine broke the protocol") from None
        if reply.code == "not_ready":
            self.status = "starting"
        raise refusal(reply)
