"""Who is signed in. The browser holds a random token. The key itself never leaves this process."""

import secrets
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from dashboard.client import AdminClient
from dashboard.settings import settings
from gateway.structs.fleet import About

COOKIE = "holdfast_session"
MAX_SESSIONS = 1000
# From one address MAX_FAILED wrong keys may be tried in WINDOW_SECONDS.
WINDOW_SECONDS = 60.0
MAX_FAILED = 8
MAX_ADDRESSES = 10_000


@dataclass(slots=True)
class Outcome:
    """What became of a change."""

    # Told to the viewer as plain text.
    message: str
    # The key that the change made; empty where it made none.
    key: str = ""


@dataclass(slots=True)
class Session:
    """One signed-in viewer. Sessions of one key share a client, and so its kept answers."""

    client: AdminClient
    # What the gateway said of the key and of its numbers when the session began.
    about: About
    # When the session ends, in seconds of the monotonic clock.
    ends: float
    # What became of the last change, until the viewer dismisses it. It is kept here because a page
    # that is loaded again has nothing else.
    outcome: Outcome | None = None

    @property
    def workspace(self) -> str | None:
        """The only workspace that this key sees; None: it sees all."""
        return self.about.workspace


class Sessions:
    """The open sessions, each of so many `seconds`. Any thread may use them.

    There are at most `MAX_SESSIONS`: one more sign-in ends the oldest session. A restart forgets
    the keys, so it signs everybody out.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, client: AdminClient, about: About) -> str:
        """Begin a session and return its cookie."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            clients = (session.client for session in self._sessions.values())
            shared_client = next(
                (candidate for candidate in clients if candidate.asks_as == client.asks_as), client
            )
            self._sessions[token] = Session(shared_client, about, self._clock() + self._seconds)
            while len(self._sessions) > MAX_SESSIONS:
                self._drop(next(iter(self._sessions)))
        if shared_client is not client:
            client.close()
        return token

    def find(self, cookie: str) -> Session | None:
        """The session of a cookie. None if the cookie is forged, or if its session or its key has
        ended."""
        with self._lock:
            session = self._sessions.get(cookie)
            if session is not None and (session.ends <= self._clock() or session.client.has_ended):
                self._drop(cookie)
                return None
            return session

    def close(self, cookie: str) -> None:
        with self._lock:
            self._drop(cookie)

    def close_all(self) -> None:
        with self._lock:
            for cookie in list(self._sessions):
                self._drop(cookie)

    def _drop(self, cookie: str) -> None:
        """Forget a session. Its client is closed with the last session that uses it. The caller
        holds the lock."""
        session = self._sessions.pop(cookie, None)
        if session and all(other.client is not session.client for other in self._sessions.values()):
            session.client.close()


@cache
def sessions() -> Sessions:
    """The sessions of this process, for the sign-in page and for the pages behind it."""
    return Sessions(settings().session_hours * 3600)


class Attempts:
    """The failed sign-ins of the last minute, by address. With more than `MAX_ADDRESSES`, the
    address that failed longest ago is forgotten."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failed: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_seconds(self, address: str) -> float:
        """How many seconds this address must wait before it may try again; 0: it may try now."""
        times = self._failed.get(address) or deque()
        last = self._clock() - WINDOW_SECONDS
        if len(times) < MAX_FAILED or times[0] <= last:
            return 0.0
        return times[0] - last

    def failed(self, address: str) -> None:
        self._failed.setdefault(address, deque(maxlen=MAX_FAILED)).append(self._clock())
        self._failed.move_to_end(address)
        while len(self._failed) > MAX_ADDRESSES:
            self._failed.popitem(last=False)
