"""Client of the gateway's admin API, the dashboard's only source of data.

Counts are of tokens, money is in nano-dollars, and times are in UTC.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

import httpx
import msgspec

TIMEOUT = httpx.Timeout(10.0, connect=2.0)
# For an answer in one piece, which comes when the model has ended.
CALL_TIMEOUT = httpx.Timeout(300.0, connect=2.0)
# The gateway sends comments during a long prefill, so a stream that is silent for longer has broken
# off.
STREAM_TIMEOUT = httpx.Timeout(60.0, connect=2.0)
# For answers that take the gateway long to compute, such as advice.
PATIENT_TIMEOUT = httpx.Timeout(90.0, connect=2.0)
# Tabs of one sign-in ask the same questions. One answer serves all of them for so long.
KEPT_SECONDS = 3.0
_MAX_KEPT = 256
Reply = TypeVar("Reply")
Params = Mapping[str, Any]


class ClientError(Exception):
    """The gateway gave no usable answer. The message can be shown to the viewer."""


class KeyRefused(ClientError):
    """The key is unknown, has ended, or may not see this."""


class KeyEnded(KeyRefused):
    """The gateway does not know the key any more: the key was revoked, or has ended."""


class NotThere(ClientError):
    """The gateway answers 404: there is no such thing, or this key may not see it."""


class NotAnswered(ClientError):
    """The request went out, and no answer says what became of it. A change may have been made."""


class Refused(ClientError):
    """The gateway refuses a change. The message is the gateway's own, so it is shown as plain text
    only."""


class _KeptAnswer(NamedTuple):
    # When the answer came, in seconds of the monotonic clock.
    at: float
    answer: Any


class AdminClient:
    """A client that asks with the viewer's own key, so that the gateway decides what the viewer
    sees. Its calls block, because each Streamlit script has its own thread. Threads may share it.
    """

    def __init__(self, gateway_url: str, key: str) -> None:
        self.asks_as = (gateway_url, key)
        """The gateway's URL and the key. Clients for which both are equal get the same answers."""
        self.has_ended = False
        """Whether the gateway no longer knows the key, so that its sessions are over."""
        self._http = httpx.Client(
            base_url=gateway_url, headers={"x-api-key": key}, timeout=TIMEOUT, trust_env=False
        )
        self._kept: OrderedDict[tuple[Any, ...], _KeptAnswer] = OrderedDict()
        self._lock = threading.Lock()

    def get(
        self,
        path: str,
        shape: type[Reply],
        params: Params | None = None,
        kept_seconds: float | None = None,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> Reply:
        """The answer. It may be a kept one that is not older than `kept_seconds` (by default
        `KEPT_SECONDS`). Raise ClientError if there is no answer."""
        max_age = KEPT_SECONDS if kept_seconds is None else kept_seconds
        query = {name: value for name, value in (params or {}).items() if value is not None}
        texts = sorted((name, str(value)) for name, value in query.items())
        question = (path, str(shape), tuple(texts))
        with self._lock:
            kept = self._kept.get(question)
        if kept is not None and time.monotonic() - kept.at < max_age:
            answer: Reply = kept.answer
            return answer
        answer = decoded(self._send("GET", path, query, timeout=timeout).content, shape)
        with self._lock:
            self._kept[question] = _KeptAnswer(time.monotonic(), answer)
            self._kept.move_to_end(question)
            while len(self._kept) > _MAX_KEPT:
                self._kept.popitem(last=False)
        return answer

    def download(self, path: str, params: Params) -> bytes:
        """The bytes of a file. Raise ClientError, for a refusal with the gateway's own words."""
        query = {name: value for name, value in params.items() if value is not None}
        with _answering():
            reply = self._http.get(path, params=query, timeout=PATIENT_TIMEOUT)
        if reply.status_code != 200:
            raise ClientError(refusal(reply))
        return reply.content

    def change(
        self,
        method: str,
        path: str,
        shape: type[Reply],
        body: Any = None,
        params: Params | None = None,
    ) -> Reply:
        """Ask for a change by POST or DELETE, and forget all kept answers. Raise ClientError."""
        with self._lock:
            self._kept.clear()
        return decoded(self._send(method, path, params, body).content, shape)

    def ask(self, path: str, shape: type[Reply], body: Mapping[str, Any]) -> Reply:
        """Ask a question that is too long for a URL. Fields of the body that are None are left out.
        Raise ClientError."""
        fields = {name: value for name, value in body.items() if value is not None}
        return decoded(
            self._send("POST", path, body=fields, timeout=PATIENT_TIMEOUT).content, shape
        )

    def _send(
        self,
        method: str,
        path: str,
        params: Params | None = None,
        body: Any = None,
        timeout: httpx.Timeout = TIMEOUT,
    ) -> httpx.Response:
        """The response of a success. Raise ClientError for any other response."""
        with _answering():
            reply = self._http.request(method, path, params=params, json=body, timeout=timeout)
        match reply.status_code:
            case 401:
                self.has_ended = True
                raise KeyEnded("The gateway knows this key no more: it has ended.")
            case 403:
                raise KeyRefused("The gateway refuses this key: sign in again with another one.")
            case 404:
                raise NotThere("The gateway knows nothing of that.")
            case 400 | 409 | 422 if method != "GET":
                raise Refused(refusal(reply))
            case 529:
                raise NotAnswered(
                    "The gateway is busy or can't read its database; its log says which."
                )
            case status if status >= 500:
                raise NotAnswered(f"The gateway answers {status}.")
            case status if not 200 <= status < 300:
                raise ClientError(f"The gateway answers {status}.")
        return reply

    def call(self, path: str, body: Any) -> tuple[dict[str, Any], str | None]:
        """A whole answer of a model API, and the id of its request. Raise ClientError, for a
        refusal with the gateway's own words."""
        with _answering():
            reply = self._http.post(path, json=body, timeout=CALL_TIMEOUT)
        if reply.status_code != 200:
            raise ClientError(refusal(reply))
        request_id = reply.headers.get("request-id") or reply.headers.get("x-request-id")
        return decoded(reply.content, dict[str, Any]), request_id

    def stream(self, path: str, body: Any, headers: Mapping[str, str]) -> Iterator[str]:
        """The lines of a streamed answer. Raise ClientError if the stream breaks off, and for a
        refusal with the gateway's own words."""
        with (
            _answering(),
            self._http.stream(
                "POST", path, json=body, headers=dict(headers), timeout=STREAM_TIMEOUT
            ) as reply,
        ):
            if reply.status_code != 200:
                reply.read()
                raise ClientError(refusal(reply))
            yield from reply.iter_lines()

    def close(self) -> None:
        self._http.close()


@contextmanager
def _answering() -> Iterator[None]:
    """Raise ClientError for an error of HTTP."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout) as error:
        raise ClientError(f"The gateway does not answer ({type(error).__name__}).") from None
    except httpx.HTTPError as error:
        raise NotAnswered(f"The gateway does not answer ({type(error).__name__}).") from None
    except RuntimeError as error:
        if "closed" not in str(error):
            raise
        raise ClientError("The session has ended.") from None  # its client is closed


def segment(text: str) -> str:
    """Any text as one segment of a path."""
    return quote(text, safe="").replace(".", "%2E") or "-"


class _Problem(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Problem


def refusal(reply: httpx.Response) -> str:
    """Why a request was refused, in the gateway's words. They are shown as plain text only."""
    try:
        body = msgspec.json.decode(reply.content, type=_Refusal)
    except msgspec.MsgspecError:
        return f"The gateway answers {reply.status_code}."
    return f"The gateway answers {reply.status_code}: {body.error.message}"


def decoded(content: bytes | str, shape: type[Reply]) -> Reply:
    """Decode JSON into this shape. Raise NotAnswered if it has another shape."""
    try:
        return msgspec.json.decode(content, type=shape)
    except msgspec.MsgspecError:
        raise NotAnswered(
            "The gateway's answer has another shape: are both of one version?"
        ) from None
