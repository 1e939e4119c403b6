"""Whether a call shows the engine's secret: asked at the door, and of each call of the protocol."""

import hmac
from collections.abc import Iterable


class Secret:
    def __init__(self, secret: str) -> None:
        self._wanted = f"Bearer {secret}".encode()

    def is_shown(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Of an ASGI scope: names are in lower case. A second `authorization` is a wrong one."""
        values = [value for name, value in headers if name == b"authorization"]
        return hmac.compare_digest(b", ".join(values), self._wanted)
