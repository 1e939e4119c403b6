"""The format of a block's file: a sealed header with the token ids, and the payload.

    magic, version, lengths, fingerprint, scope, chain and parent digests, place   fixed
    token ids, 32 bits each                                                        num_tokens x 4
    checksum of the payload, XXH3 of 128 bits, and 16 zeros                        32
    seal: keyed digest of everything before it                                     32
    payload                                                                        payload_bytes

The seal covers the payload's checksum, so that header and payload can't be of two files. The
checksum finds damage and is not keyed: who may write a store's files may read its secret as well.
Files of version 1 have a BLAKE2b digest of 256 bits as their checksum, and are read too. Pure.
"""

import hmac
import struct
from collections.abc import Callable, Mapping
from hashlib import blake2b
from types import MappingProxyType
from typing import Literal

from xxhash import xxh3_128_digest

from engine.cache.digests import TOKEN_BYTES
from engine.cache.ids import Digest
from engine.cache.store_tier import BlockKey, Payload
from engine.store.keys import StoreKeys

MAGIC = b"HOLDFAST"
VERSION = 2
MAX_TOKENS = 1024
"""The most token ids of one block."""
_FIXED = struct.Struct("<8sIIIIQ16s16s16s16s")
_SUM_BYTES = 32

Damage = Literal[
    "missing",
    "unreadable",
    "short",
    "not_ours",
    "version",
    "checksum",
    "other_model",
    "misplaced",
    "tokens",
]
"""Why a file is no block: it is gone, can't be read, has another length, begins with other bytes,
is of another version, was changed or is of another installation, is of another model, stands under
another's name, or has other tokens than were asked for."""
DAMAGES: tuple[Damage, ...] = (
    "missing",
    "unreadable",
    "short",
    "not_ours",
    "version",
    "checksum",
    "other_model",
    "misplaced",
    "tokens",
)


class Damaged(Exception):
    """A file has not the content that its key asks for. The message is one of the reasons above."""

    def __init__(self, reason: Damage) -> None:
        super().__init__(reason)
        self.reason: Damage = reason


def header_bytes(num_tokens: int) -> int:
    return _FIXED.size + num_tokens * TOKEN_BYTES + 2 * _SUM_BYTES


def encode_header(key: BlockKey, payload: Payload, fingerprint: bytes, keys: StoreKeys) -> bytes:
    """A file's bytes up to its payload."""
    num_tokens = len(key.packed) // TOKEN_BYTES
    fixed = _FIXED.pack(
        MAGIC,
        VERSION,
        header_bytes(num_tokens),
        num_tokens,
        key.place,
        len(payload),
        fingerprint,
        key.owner,
        key.digest,
        key.parent,
    )
    sealed = fixed + key.packed + _CHECKSUMS[VERSION](payload)
    return sealed + _seal(sealed, keys)


def encode(key: BlockKey, payload: Payload, fingerprint: bytes, keys: StoreKeys) -> bytes:
    """A file's bytes."""
    return encode_header(key, payload, fingerprint, keys) + payload


def decode_header(
    data: bytes | memoryview, name: str, size: int, fingerprint: bytes, keys: StoreKeys
) -> BlockKey:
    """The key of the file `name`, of `size` bytes, which begins with `data`. Raises Damaged."""
    return _read_header(data, name, size, fingerprint, keys)[0]


def decode(data: bytes, wanted: BlockKey, fingerprint: bytes, keys: StoreKeys) -> bytes:
    """The payload of a whole file that must be of this key. Raises Damaged."""
    key, start, version = _read_header(data, wanted.name, len(data), fingerprint, keys)
    payload = data[start:]
    expected = data[start - 2 * _SUM_BYTES : start - _SUM_BYTES]
    if not hmac.compare_digest(_CHECKSUMS[version](payload), expected):
        raise Damaged("checksum")
    if key.packed != wanted.packed:
        raise Damaged("tokens")
    if key != wanted:
        raise Damaged("misplaced")
    return payload


def _read_header(
    data: bytes | memoryview, name: str, size: int, fingerprint: bytes, keys: StoreKeys
) -> tuple[BlockKey, int, int]:
    """The key, where the payload begins, and the version."""
    view = memoryview(data)
    if len(view) < _FIXED.size:
        raise Damaged("short")
    magic, version, length, num_tokens, index, payload_bytes, model, owner, digest, parent = (
        _FIXED.unpack(view[: _FIXED.size])
    )
    if magic != MAGIC:
        raise Damaged("not_ours")
    if version not in _CHECKSUMS:
        raise Damaged("version")
    if num_tokens > MAX_TOKENS or length != header_bytes(num_tokens):
        raise Damaged("checksum")
    if len(view) < length or size != length + payload_bytes:
        raise Damaged("short")
    sealed = view[: length - _SUM_BYTES]
    if not hmac.compare_digest(_seal(sealed, keys), bytes(view[length - _SUM_BYTES : length])):
        raise Damaged("checksum")
    if model != fingerprint:
        raise Damaged("other_model")
    if keys.name_of(digest) != name:
        raise Damaged("misplaced")
    packed = bytes(view[_FIXED.size : _FIXED.size + num_tokens * TOKEN_BYTES])
    key = BlockKey(name, Digest(owner), Digest(digest), Digest(parent), index, packed)
    return key, length, version


def _blake2b(payload: Payload) -> bytes:
    return blake2b(payload, digest_size=_SUM_BYTES).digest()


def _xxh3(payload: Payload) -> bytes:
    return xxh3_128_digest(payload).ljust(_SUM_BYTES, b"\0")


_CHECKSUMS: Mapping[int, Callable[[Payload], bytes]] = MappingProxyType({1: _blake2b, 2: _xxh3})
"""The function that makes the checksum, by version."""


def _seal(sealed: bytes | memoryview, keys: StoreKeys) -> bytes:
    return blake2b(sealed, key=keys.seal, digest_size=_SUM_BYTES).digest()
