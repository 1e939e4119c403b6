"""What a store derives from its installation's secret: keys, names and the model's fingerprint."""

from collections.abc import Mapping
from functools import cached_property
from hashlib import blake2b

SECRET_BYTES = 32
FINGERPRINT_BYTES = 16


class StoreKeys:
    """Keys that follow from one secret. None of them tells another."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret

    @cached_property
    def chain(self) -> bytes:
        """The key of chain digests: the same after a restart."""
        return self._derive(b"chain")

    @cached_property
    def seal(self) -> bytes:
        """The key of checksums, so that a file of another installation has none that is right."""
        return self._derive(b"seal")

    def name_of(self, digest: bytes) -> str:
        """The file name for a chain digest. It tells nothing of content, scope or order."""
        return blake2b(digest, key=self._names, digest_size=16).hexdigest()

    @cached_property
    def _names(self) -> bytes:
        return self._derive(b"name")

    def _derive(self, use: bytes) -> bytes:
        return blake2b(b"", key=self._secret, digest_size=32, person=use).digest()


def fingerprint(facts: Mapping[str, str]) -> bytes:
    """A digest of all that a block's content depends on besides its tokens.

    `facts` are of the weights, the template, the tokenizer, the dtype and the layout.
    """
    state = blake2b(digest_size=FINGERPRINT_BYTES, person=b"fingerprint")
    for name, value in sorted(facts.items()):
        for text in (name, value):
            encoded = text.encode()
            state.update(len(encoded).to_bytes(8, "little"))
            state.update(encoded)
    return state.digest()
