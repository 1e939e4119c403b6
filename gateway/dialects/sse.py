"""Server-sent events: named ones as the Messages API frames them, bare data as OpenAI does."""

from typing import Any

import msgspec

SPACE = b" "
"""Keeps a connection alive where bare data is open: JSON may begin with blanks."""
OPEN = b"data: "
END = b"\n\n"
NEXT = END + OPEN
COMMENT = b": \n\n"
DONE = b"data: [DONE]\n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'

_encode = msgspec.json.Encoder().encode


def event(name: str, data: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode(data))


def data(value: Any) -> bytes:
    return b"data: %s\n\n" % _encode(value)
