"""The day that a template writes (`strftime_now`): one for each beginning of prompts."""

from hashlib import blake2b

import msgspec

from engine.protocol import Prompt

_DIGEST_BYTES = 16


class KnownDays(msgspec.Struct, frozen=True):
    """Today, and the days of beginnings that were first used on another day. Days are ISO dates."""

    today: str
    earlier: dict[bytes, str] = {}

    def day_of(self, beginning: bytes) -> str:
        return self.earlier.get(beginning, self.today)


class DatedBeginning(msgspec.Struct, frozen=True):
    """A prompt's beginning was rendered with a day (ISO)."""

    beginning: bytes
    day: str


def beginning_of(prompt: Prompt, scope: str) -> bytes:
    """A digest (16 bytes) of the scope, the tools and the system prompt; linear in their length."""
    static = msgspec.json.encode((scope, prompt.tools, prompt.system))
    return blake2b(static, digest_size=_DIGEST_BYTES).digest()
