"""A model server that is not ours: calls to it, its slots, and the facts found out at the start.

Every answer has a bound on its bytes, and on the time between two of them.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar

import httpx
import msgspec

from engine.cache.digests import TOKEN_BYTES
from engine.cache.ids import TokenId
from engine.protocol import Capability, ErrorCode, Sampling
from engine.protocol.reports import Guarantee
from engine.refusal import StartRefused
from engine.supervisor import Expected
from engine.text.files import read_json, recommended
from engine.text.renderer import ChatRenderer
from engine.text.template.boundaries import common_length

T = TypeVar("T")

CONNECT_SECONDS = 5.0
LOOK_SECONDS = 10.0
"""How long a small call may take, such as for a model's name or a count of tokens."""
MAX_REPLY_BYTES = 8 * 2**20
MAX_EVENT_BYTES = 2**20
"""The most bytes of one event, with the comments and empty lines before it."""
_BUSY = {429, 503, 529}


class UpstreamError(Expected):
    """A server's answer that can't be used. The message is for operators and quotes no prompt."""

    code: ClassVar[ErrorCode] = "internal"


class UpstreamBusy(UpstreamError):
    """The server has no room for this request now."""

    code: ClassVar[ErrorCode] = "overloaded"


class UpstreamGone(UpstreamError):
    """The server can't be reached, or a connection to it broke."""

    code: ClassVar[ErrorCode] = "not_ready"


class UpstreamAborted(UpstreamError):
    """The server gave up a request that it had taken. Somebody paused it or ended its requests."""

    code: ClassVar[ErrorCode] = "not_ready"


class UpstreamRejected(UpstreamError):
    """The server does not take this request."""


class UpstreamDenied(UpstreamError):
    """The server wants a key, or another key than it got."""


class UpstreamRefused(StartRefused):
    """This server can't be used at all. The message says why, and what to change."""


class Wire:
    """Calls to one server. A `/v1` at the end of `url` is removed.

    All calls raise UpstreamError, and UpstreamGone if the server can't be reached.
    """

    def __init__(
        self, url: str, key: str, silence_seconds: float, *, keeps_connections: bool = True
    ) -> None:
        """Without `keeps_connections` each call has its own connection.

        llama.cpp closes idle connections. A call that is sent at that moment fails, and an action
        on a slot can't be repeated.
        """
        headers = {"content-type": "application/json", "accept-encoding": "identity"}
        self.url = url
        self._client = httpx.AsyncClient(
            base_url=url.rstrip("/").removesuffix("/v1"),
            headers=headers | ({"authorization": f"Bearer {key}"} if key else {}),
            limits=httpx.Limits(
                max_connections=None, max_keepalive_connections=64 if keeps_connections else 0
            ),
            follow_redirects=False,
            trust_env=False,
        )
        self._silence = httpx.Timeout(silence_seconds, connect=CONNECT_SECONDS, pool=None)

    async def look(self, path: str) -> tuple[int, bytes]:
        """The status and the body of a GET, whatever the status is."""
        async with self._call(path, None, is_long=False) as response:
            return response.status_code, await _body(response)

    async def ask(
        self,
        path: str,
        kind: type[T],
        body: Any = None,
        *,
        is_long: bool = False,
        seconds: float = LOOK_SECONDS,
    ) -> T:
        """The decoded answer of a GET, or of a POST if there is a `body`.

        The server may be silent for `seconds`, or with `is_long` for as long as in a generation.
        """
        async with self._call(path, body, is_long=is_long, seconds=seconds) as response:
            check_status(response.status_code, path)
            return decoded(await _body(response), kind, path)

    async def events(self, path: str, body: Any) -> AsyncGenerator[bytes, None]:
        """The data of a stream of server-sent events. Closing it closes the connection."""
        async with self._call(path, body, is_long=True) as response:
            check_status(response.status_code, path)
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise UpstreamError(f"{path}: no stream of events")
            async for data in event_data(response.aiter_raw()):
                yield data

    async def close(self) -> None:
        await self._client.aclose()

    @asynccontextmanager
    async def _call(
        self, path: str, body: Any, *, is_long: bool, seconds: float = LOOK_SECONDS
    ) -> AsyncIterator[httpx.Response]:
        brief = httpx.Timeout(seconds, connect=CONNECT_SECONDS, pool=None)
        try:
            async with self._client.stream(
                "GET" if body is None else "POST",
                path,
                content=None if body is None else msgspec.json.encode(body),
                timeout=self._silence if is_long else brief,
            ) as response:
                yield response
        except httpx.ReadTimeout as error:
            raise UpstreamError(f"{path}: the server said nothing in time") from error
        except httpx.HTTPError as error:
            raise UpstreamGone(f"{path}: {type(error).__name__}") from error


def check_status(status: int, path: str) -> None:
    """Raise UpstreamError or a subclass of it, unless the status is 200."""
    if status in _BUSY:
        raise UpstreamBusy(f"{path}: the server is overloaded (status {status})")
    if status in (401, 403):
        raise UpstreamDenied(f"{path}: status {status}: set ENGINE_UPSTREAM_KEY")
    if status in (400, 413, 422):
        raise UpstreamRejected(f"{path}: status {status}")
    if status != 200:
        raise UpstreamError(f"{path}: status {status}")


def decoded(body: bytes, kind: type[T], path: str) -> T:
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        raise UpstreamError(f"{path}: an answer of another form") from None


async def event_data(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The `data` of each event. Raises UpstreamError for an event over MAX_EVENT_BYTES."""
    # The chunks of an unfinished line. They are joined once, so that each byte is looked at once.
    rest = list[bytes]()
    data = list[bytes]()
    size = 0
    async for chunk in chunks:
        rest.append(chunk)
        size += len(chunk)
        if b"\n" in chunk:
            *lines, last = b"".join(rest).split(b"\n")
            rest = [last]
            for line in (line.removesuffix(b"\r") for line in lines):
                if line.startswith(b"data:"):
                    data.append(line[5:].removeprefix(b" "))
                elif not line and data:
                    yield b"\n".join(data)
                    data = []
                    size = len(last)
        if size > MAX_EVENT_BYTES:
            raise UpstreamError("the stream goes on without the end of an event")
    if data:
        yield b"\n".join(data)


async def _body(response: httpx.Response) -> bytes:
    body = bytearray()
    async for chunk in response.aiter_raw():
        body += chunk
        if len(body) > MAX_REPLY_BYTES:
            raise UpstreamError(f"{response.request.url.path}: the answer is too long")
    return bytes(body)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request is computed."""

    slot: int
    # Whether the slot's content may be used again. False: all of the prompt is computed.
    may_reuse: bool


ANYWHERE = Place(0, True)


@dataclass(slots=True)
class _Slot:
    """One of llama.cpp's slots."""

    number: int
    scope: str = ""
    # The last prompt's token ids, packed.
    prompt: bytes = b""
    is_busy: bool = False
    last_use: int = 0


class Slots:
    """llama.cpp's slots, each for one scope at a time. To be used on one event loop."""

    def __init__(self, num_slots: int) -> None:
        self._slots = [_Slot(number) for number in range(num_slots)]
        self._free = asyncio.Semaphore(num_slots)
        self._uses = 0

    @property
    def num_taken(self) -> int:
        return sum(slot.is_busy for slot in self._slots)

    @asynccontextmanager
    async def taken(self, scope: str, prompt: bytes) -> AsyncIterator[Place]:
        """A place for this prompt, until the context ends. `prompt` are its packed token ids.

        Of the free slots of its scope the one with the longest common beginning is taken. Without a
        common beginning an unused slot goes first, and without a slot of the scope the one that was
        not used for longest.
        """
        async with self._free:
            free = [slot for slot in self._slots if not slot.is_busy]
            alike = {
                slot.number: common_length(slot.prompt, prompt, TOKEN_BYTES)
                for slot in free
                if slot.scope == scope
            }
            best = unused = min(free, key=lambda slot: slot.last_use)
            if alike and (unused.scope or any(alike.values())):
                best = self._slots[max(alike, key=lambda number: alike[number])]
            may_reuse = best.scope == scope
            self._uses += 1
            best.scope = scope
            best.prompt = prompt
            best.is_busy = True
            best.last_use = self._uses
            try:
                yield Place(best.number, may_reuse)
            finally:
                best.is_busy = False


Kind = Literal["vllm", "llamacpp", "openai"]
Isolation = Literal["salt", "slots", "none"]
Tells = Literal["with_tokens", "at_the_end", "never"]
"""When a server tells how many of a prompt's tokens it reused."""

PROBE_TEXTS = (
    "The quick brown fox jumps over 13 lazy dogs.\n\n  def f(x):\n\treturn x ** 2\n",
    "Größe, naïve, 東京, Привет, 🙂👍🏽 — “quoted” …",
)
"""The texts on which a server's tokenizer is compared with ours."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Facts of the model's own files, which a server does not tell."""

    vocabulary_size: int
    # The context in tokens that the model was trained for.
    max_context_tokens: int | None
    sampling: Sampling
    # The tokens of PROBE_TEXTS by our tokenizer.
    probes: Mapping[str, list[TokenId]]

    @classmethod
    def of(cls, model: str, renderer: ChatRenderer) -> "ModelFacts":
        """The facts of a Hugging Face directory or hub id. Raises TemplateRefused for a broken
        file."""
        config = read_json(model, "config.json")
        text = config.get("text_config")
        encode = renderer.tokenizer.encode
        inner: Mapping[str, Any] = text if isinstance(text, dict) else config
        num_tokens = renderer.tokenizer.get_vocab_size(with_added_tokens=True)
        return cls(
            vocabulary_size=max(num_tokens, _whole(inner.get("vocab_size")) or 0),
            max_context_tokens=_whole(inner.get("max_position_embeddings")),
            sampling=recommended(read_json(model, "generation_config.json")),
            probes={text: encode(text, add_special_tokens=False).ids for text in PROBE_TEXTS},
        )

    def context(self, server_context: int | None) -> int:
        """The server's context in tokens, or the one that the model was trained for.

        Raises UpstreamRefused if neither is known.
        """
        context = server_context or self.max_context_tokens
        if context is None or not 0 < context < 2**31:
            raise UpstreamRefused("neither the server nor the model's config.json tells a context")
        return context

    def check_tokens(self, tokens: Sequence[int]) -> list[TokenId]:
        """The same ids as tokens. Raises UpstreamError for an id outside the vocabulary."""
        if not all(0 <= token < self.vocabulary_size for token in tokens):
            raise UpstreamError("a token that the model does not have")
        return [TokenId(token) for token in tokens]


def _whole(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What is known of a running server. The notes are for people."""

    kind: Kind
    # The last part of the served model's path. An alias is used only if the path is not told.
    model: str
    max_context_tokens: int
    # The most requests that are sent to it at a time.
    max_running: int
    tells: Tells
    isolation: Isolation
    version: str = ""
    tells_note: str = ""
    isolation_note: str = ""
    forced_note: str = ""
    # Whether marked prefixes are leased in the server's slot files.
    holds: bool = False
    # How they are leased, or why they are not.
    hold_note: str = "no_hold: the server evicts when it wants"
    # None: the server does not tell.
    block_size: int | None = None
    # None: the server does not tell.
    num_blocks: int | None = None
    # It changes when the server is started anew, if the server shows that at all.
    fingerprint: str = ""
    capabilities: frozenset[Capability] = frozenset({"multiple_choices"})

    def guarantees(self) -> list[Guarantee]:
        """Which of the protocol's promises an engine in front of this server keeps."""
        tells = self.tells != "never"
        forced = "forced_tools" in self.capabilities
        written = (
            "what was marked less what the server reused"
            if tells
            else "not told: what the server reused is counted as written"
        )
        events = (
            "leases, and the names at their ends"
            if self.holds
            else "evictions are not told; an entry ends when less is reused"
        )
        return [
            Guarantee("exact_read", tells, self.tells_note),
            Guarantee("exact_write", tells, written),
            Guarantee("hold", self.holds, self.hold_note),
            Guarantee("isolation", self.isolation != "none", self.isolation_note),
            Guarantee("events", self.holds, events),
            Guarantee("forced_tools", forced, self.forced_note),
        ]
