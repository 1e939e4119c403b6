"""Server-sent events, exactly as the Messages API frames them."""

import msgspec

COMMENT = b": \n\n"
PING = b'event: ping\ndata: {"type": "ping"}\n\n'

_encode = msgspec.json.Encoder().encode


def event(name: str, data: msgspec.Struct) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), _encode(data))
