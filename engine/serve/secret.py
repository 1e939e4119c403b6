"""Whether a request shows the engine's secret.

It is checked when a request arrives, and again for each call of the protocol.
"""

import hmac
from collections.abc import Iterable


class Secret:
    def __init__(self, secret: str) -> None:
        self._wanted = f"Bearer {secret}".encode()

    def is_shown(self, headers: Iterable[tuple[bytes, bytes]]) -> bool:
        """Whether these headers of an ASGI scope show the secret. Their names are in lower case.

        With two `authorization` headers the answer is no.
        """
        values = [value for name, value in headers if name == b"authorization"]
        return hmac.compare_digest(b", ".join(values), self._wanted)
