"""Reasoning that a client carries from one request to the next, in `encrypted_content`.

The text is signed with the workspace's scope, so that only what this installation wrote for this
workspace is read as the model's own. It is not hidden: the client saw it in the response.
"""

import hmac
from base64 import b64decode, urlsafe_b64encode
from hashlib import blake2b

_PREFIX = "hf1."
_DIGEST_BYTES = 16


def seal(thought: str, scope: str) -> str:
    text = thought.encode()
    return _PREFIX + urlsafe_b64encode(_digest(text, scope) + text).decode()


def unseal(sealed: str, scope: str) -> str | None:
    """The thought, or None where somebody else wrote it."""
    if not sealed.startswith(_PREFIX):
        return None
    try:
        whole = b64decode(sealed[len(_PREFIX) :].encode(), altchars=b"-_", validate=True)
    except ValueError:
        return None
    digest, text = whole[:_DIGEST_BYTES], whole[_DIGEST_BYTES:]
    if not hmac.compare_digest(digest, _digest(text, scope)):
        return None
    return text.decode()


def _digest(text: bytes, scope: str) -> bytes:
    return blake2b(
        text, digest_size=_DIGEST_BYTES, key=scope.encode()[:64], person=b"thought"
    ).digest()
