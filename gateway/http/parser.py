"""HTTP/1.1 requests, also of clients that ask for another protocol.

RFC 9110, 7.8: a server may ignore an Upgrade. httptools takes what follows such a head for the
other protocol, and the body would be taken for the next request. Java's default client asks so in
every first request (`Upgrade: h2c`). So the head is parsed again without its wish.
"""

from typing import Protocol

import httptools

_OF_UPGRADES = (b"upgrade", b"http2-settings")


class RequestCallbacks(Protocol):
    """The part of a connection that the parser needs, beside the callbacks of httptools.

    `is_repeated`: the head that is complete now comes once more, so nothing is done about it yet.
    A CONNECT must be refused when its head is complete: it has no body, and nothing follows it.
    """

    is_repeated: bool
    url: bytes
    headers: list[tuple[bytes, bytes]]


class RequestParser:
    """An `httptools.HttpRequestParser` that knows no upgrades."""

    def __init__(self, callbacks: RequestCallbacks) -> None:
        self._callbacks = callbacks
        self._parser = httptools.HttpRequestParser(callbacks)

    def feed_data(self, data: bytes) -> None:
        """Raise HttpParserError."""
        while True:
            try:
                return self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                data = self._head_again() + data[upgrade.args[0] :]

    @property
    def is_to_repeat(self) -> bool:
        """Whether the head that is complete now asks for another protocol."""
        return self._parser.should_upgrade() and self.get_method() != b"CONNECT"

    def should_upgrade(self) -> bool:
        return False

    def should_keep_alive(self) -> bool:
        return self._parser.should_keep_alive()

    def get_http_version(self) -> str:
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        return self._parser.get_method()

    def _head_again(self) -> bytes:
        """The head of this request without what concerns another protocol, for a new parser."""
        callbacks = self._callbacks
        method, version = self.get_method(), self.get_http_version().encode()
        lines = [method + b" " + callbacks.url + b" HTTP/" + version]
        for name, value in callbacks.headers:
            if name == b"connection":
                options = [option.strip() for option in value.split(b",")]
                value = b", ".join(one for one in options if one.lower() not in _OF_UPGRADES)
            if value and name not in _OF_UPGRADES:
                lines.append(name + b": " + value)
        callbacks.is_repeated = False
        self._parser = httptools.HttpRequestParser(callbacks)
        return b"\r\n".join([*lines, b"", b""])
