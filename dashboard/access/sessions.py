"""Who is signed in. The browser holds a signed token; the key itself never leaves this process."""

import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from itsdangerous import BadSignature, TimestampSigner

from dashboard.admin.client import AdminClient
from dashboard.admin.shapes.about import About
from dashboard.settings import settings

COOKIE = "holdfast_session"
MAX_SESSIONS = 1000


@dataclass(frozen=True, slots=True)
class Session:
    """`about` is what the gateway said of the key and of its numbers when the session began.

    Sessions with one key share a client, and so its answers.
    """

    client: AdminClient
    about: About
    ends: float

    @property
    def workspace(self) -> str | None:
        """The only workspace that this key sees; None is all."""
        return self.about.workspace


class Sessions:
    """Bounded: the oldest sign-in ends when there are too many. Safe to use from any thread."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        # The secret of this process. A restart forgets the keys, so it signs everybody out.
        self._signer = TimestampSigner(secrets.token_bytes(32), salt=COOKIE)
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, client: AdminClient, about: About) -> str:
        """Begin a session and return its cookie."""
        token = secrets.token_urlsafe(32)
        with self._lock:
            known = (session.client for session in self._sessions.values())
            own = next((each for each in known if each.is_same(client)), client)
            self._sessions[token] = Session(own, about, self._clock() + self._seconds)
            while len(self._sessions) > MAX_SESSIONS:
                self._drop(next(iter(self._sessions)))
        if own is not client:
            client.close()
        return self._signer.sign(token).decode()

    def find(self, cookie: str) -> Session | None:
        """The session of a cookie. None where the cookie is forged or its session has ended."""
        token = self._token(cookie)
        with self._lock:
            found = self._sessions.get(token) if token else None
            if found is not None and found.ends <= self._clock():
                self._drop(token)
                return None
            return found

    def close(self, cookie: str) -> None:
        token = self._token(cookie)
        with self._lock:
            self._drop(token)

    def close_all(self) -> None:
        with self._lock:
            for token in list(self._sessions):
                self._drop(token)

    def _drop(self, token: str | None) -> None:
        """Forget a session, and its client with the last one that uses it. Under the lock."""
        found = self._sessions.pop(token or "", None)
        if found and all(each.client is not found.client for each in self._sessions.values()):
            found.client.close()

    def _token(self, cookie: str) -> str | None:
        try:
            return self._signer.unsign(cookie, max_age=int(self._seconds) + 1).decode()
        except (BadSignature, UnicodeError):
            return None


@cache
def sessions() -> Sessions:
    """The sessions of this process, for the sign-in page and for the pages behind it."""
    return Sessions(settings().session_hours * 3600)
