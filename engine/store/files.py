"""The store's files: keys, the format of a block's file, the directory, and shared directories.

    secret       32 random bytes, made once
    lock         held by the engine that uses the directory
    format       the version of all of it
    journal      the entries (`journal.py`)
    blocks/xx/   one file a block, by name
    new/         files that are being written

Directories have mode 0700, files 0600. A file is written under another name and renamed, so a name
never stands for a part of a file while the machine runs. A block's file is:

    magic, version, lengths, fingerprint, scope, chain and parent digests, place   fixed
    token ids, 32 bits each                                                        num_tokens x 4
    checksum of all but itself, XXH3 of 128 bits                                   16
    payload                                                                        payload_bytes

A reader knows which bytes must stand in front of the payload, and rejects every other file. The
checksum finds damage. It has no key, since whoever may write a store's files may also read its
secret.

A store that several engines of one model share has one secret for all, and one such directory a
member: `members/MODEL-N/`. A member writes and deletes in its own alone, under its lock, so that
concurrent writers, crashes and other versions never meet in a file. All members read all.
"""

import fcntl
import os
import secrets
import shutil
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import IO, Literal, NamedTuple

from xxhash import xxh3_128

from engine.cache.digests import TOKEN_BYTES
from engine.cache.store_tier import BlockKey, Payload
from engine.protocol import LONGEST_SECONDS
from engine.protocol.reports import StoreRefusal

SECRET_BYTES = 32
FINGERPRINT_BYTES = 16
MAX_JOURNAL_BYTES = 2**30
MAX_MEMBERS = 64
STALE_SECONDS = LONGEST_SECONDS + 4 * 3600.0
"""A member that no engine uses is removed after this time. No TTL class lasts longer. A cached
content may last longer, and is removed with the member all the same."""
FORMAT = 4
"""The version of a directory and its files. An engine leaves a directory of another version
alone."""

_MAGIC = b"HOLDFAST"
_FIXED = struct.Struct("<8sIIIIQ16s16s16s16s")
_SUM_BYTES = 16
_NAME_DIGITS = 32
_OWN = {"secret", "lock", "format", "journal", "blocks", "new", "lost+found"}

Damage = Literal["missing", "unreadable", "short", "checksum"]
"""Why a file is no block: it is gone, can't be read, has another length, or has other bytes than
the block. It has other bytes if it was changed, or if another model or installation wrote it."""


class Arrived(NamedTuple):
    name: str
    payload: bytes


class Missed(NamedTuple):
    """A file is damaged or gone. It is deleted, unless the engine knows another file of its
    name."""

    name: str
    reason: Damage


class StoreRefused(Exception):
    """The directory can't be this engine's store."""

    def __init__(self, reason: StoreRefusal, message: str) -> None:
        super().__init__(message)
        self.reason: StoreRefusal = reason


class StoreKeys:
    """Keys that are derived from one secret. No key can be derived from another.

    `chain` is the key of chain digests. `seal` is the key of the journal's lines: a line of another
    installation has no right seal.
    """

    def __init__(self, secret: bytes) -> None:
        self.chain = _derived_key(secret, b"chain")
        self.seal = _derived_key(secret, b"seal")
        self._names = _derived_key(secret, b"name")

    def name_of(self, digest: bytes) -> str:
        """The file name for a chain digest. It tells nothing of content, scope or order."""
        return blake2b(digest, key=self._names, digest_size=16).hexdigest()


def _derived_key(secret: bytes, use: bytes) -> bytes:
    return blake2b(b"", key=secret, digest_size=32, person=use).digest()


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


# The format of a block's file.


def header_bytes(num_tokens: int) -> int:
    return _FIXED.size + num_tokens * TOKEN_BYTES + _SUM_BYTES


def encode_header(key: BlockKey, payload: Payload, model: bytes) -> bytes:
    """A file's bytes up to its payload. `model` is a fingerprint."""
    num_tokens = len(key.packed) // TOKEN_BYTES
    lengths = header_bytes(num_tokens), num_tokens, key.place, len(payload)
    fixed = _FIXED.pack(_MAGIC, FORMAT, *lengths, model, key.owner, key.digest, key.parent)
    checksum = xxh3_128(fixed + key.packed)
    checksum.update(payload)
    return fixed + key.packed + checksum.digest()


def decode(data: bytes, key: BlockKey, model: bytes, payload_bytes: int) -> bytes | Damage:
    """The payload of a whole file of this key, model and size, or what is wrong."""
    start = header_bytes(len(key.packed) // TOKEN_BYTES)
    if len(data) != start + payload_bytes:
        return "short"
    payload = data[start:]
    return payload if data[:start] == encode_header(key, payload, model) else "checksum"


class BlockReader(NamedTuple):
    """Reads the files of one model in any member's directory. Any thread may call it."""

    model: bytes
    payload_bytes: int
    keys: StoreKeys

    def miss_of(self, root: Path, key: BlockKey) -> Missed | None:
        """Why there is no file of this key's name and size. The content is not looked at."""
        try:
            is_whole = _size_of(root, key.name) == self._file_bytes(key)
        except OSError as error:
            return _missed(key.name, error)
        return None if is_whole else Missed(key.name, "short")

    def read(self, root: Path, key: BlockKey) -> Arrived | Missed:
        """The payload of a whole file of this key, or why there is none."""
        try:
            data = _read_block(root, key.name, self._file_bytes(key) + 1)
        except OSError as error:
            return _missed(key.name, error)
        content = decode(data, key, self.model, self.payload_bytes)
        return (
            Arrived(key.name, content) if isinstance(content, bytes) else Missed(key.name, content)
        )

    def _file_bytes(self, key: BlockKey) -> int:
        return header_bytes(len(key.packed) // TOKEN_BYTES) + self.payload_bytes


def _missed(name: str, error: OSError) -> Missed:
    return Missed(name, "missing" if isinstance(error, FileNotFoundError) else "unreadable")


# The directory. Raises OSError as files do.


class StoreDirectory:
    """A directory that this process alone uses until `close`."""

    def __init__(self, path: Path, *, secret: bytes | None = None) -> None:
        """`secret`: that of all members of a shared store, in place of one of its own.

        Raises StoreRefused, and OSError where rights or room are missing.
        """
        self.path = path
        self._blocks = path / "blocks"
        self._new = path / "new"
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        strangers = sorted(set(os.listdir(path)) - _OWN)
        if strangers:
            message = f"{path} has files that are not a store's: {strangers[0]}"
            raise StoreRefused("strangers", message)
        path.chmod(0o700)
        self._lock = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _check_format(path)
            self._new.mkdir(mode=0o700, exist_ok=True)
            version = b"%d\n" % FORMAT
            if not (path / "format").exists() or (path / "format").read_bytes() != version:
                self._write_new(path / "format", version, is_synced=True)
            self._blocks.mkdir(mode=0o700, exist_ok=True)
            for left in self._new.iterdir():
                left.unlink()
            place = path / "secret"
            if secret is None and place.exists():
                place.chmod(0o600)
                secret = place.read_bytes()
            if secret is None or len(secret) != SECRET_BYTES:
                # A secret that is not whole is made anew, which makes all content unreadable.
                secret = secrets.token_bytes(SECRET_BYTES)
                self._write_new(path / "secret", secret, is_synced=True)
            self.keys = StoreKeys(secret)
        except BlockingIOError:
            self.close()
            raise StoreRefused("in_use", f"{path} is in use by another engine") from None
        except (OSError, StoreRefused):
            self.close()
            raise

    @property
    def is_gone(self) -> bool:
        """Whether somebody else removed the directory, or what it is mounted from."""
        return not (self._blocks.exists() and self._new.exists())

    def close(self) -> None:
        """Let another process have the directory."""
        os.close(self._lock)

    def names(self) -> Iterator[str]:
        """The names of all block files. What else is there is deleted."""
        for folder in sorted(os.listdir(self._blocks)):
            inside = self._blocks / folder
            if inside.is_symlink() or not inside.is_dir():
                inside.unlink()
                continue
            for name in sorted(os.listdir(inside)):
                is_name = len(name) == _NAME_DIGITS and set(name) <= set("0123456789abcdef")
                if is_name and name[:2] == folder:
                    yield name
                elif not (inside / name).is_dir():
                    (inside / name).unlink()

    def write(self, name: str, *parts: Payload) -> None:
        """Make a file of these parts, whole or not at all."""
        self._write_new(_place_of(self.path, name), *parts)

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            _place_of(self.path, name).unlink()

    def journal_lines(self) -> list[bytes]:
        """All lines, the oldest first. The last one may be torn."""
        try:
            with open(self.path / "journal", "rb") as file:
                return file.read(MAX_JOURNAL_BYTES).splitlines(keepends=True)
        except FileNotFoundError:
            return []

    def append_journal(self, lines: bytes) -> None:
        with _opened(self.path / "journal", "ab") as file:
            file.write(lines)

    def rewrite_journal(self, lines: bytes) -> None:
        self._write_new(self.path / "journal", lines, is_synced=True)

    def _write_new(self, place: Path, *parts: Payload, is_synced: bool = False) -> None:
        new = self._new / place.name
        try:
            with _opened(new, "wb") as file:
                file.writelines(parts)
                if is_synced:
                    file.flush()
                    os.fsync(file)
            try:
                os.replace(new, place)
            except FileNotFoundError:  # the first file of its folder
                place.parent.mkdir(mode=0o700, exist_ok=True)
                os.replace(new, place)
        except OSError:
            with suppress(OSError):
                new.unlink()
            raise


def _check_format(path: Path) -> None:
    """Raise StoreRefused for a directory of another version, which is left as it is.

    A number that can't be read is damage. A directory without a number is new.
    """
    number = path / "format"
    version = number.read_bytes().strip() if number.exists() else b""
    if not version.isdigit() or int(version) == FORMAT:
        return
    reason: StoreRefusal = "newer" if int(version) > FORMAT else "older"
    raise StoreRefused(
        reason,
        f"{path} is of the {reason} format {int(version)}, and this version's is {FORMAT}: start"
        " the version that made it, or delete the directory, which loses the prompts held there:"
        " they are computed again",
    )


def _place_of(root: Path, name: str) -> Path:
    return root / "blocks" / name[:2] / name


def _size_of(root: Path, name: str) -> int:
    return _place_of(root, name).lstat().st_size


def _read_block(root: Path, name: str, max_bytes: int) -> bytes:
    with _opened(_place_of(root, name), "rb") as file:
        data: bytes = file.read(max_bytes)
        # Not kept in the page cache: it goes into the engine's memory.
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        return data


def _opened(place: Path, mode: str) -> IO[bytes]:
    def opener(path: str, flags: int) -> int:
        return os.open(path, flags | os.O_NOFOLLOW, 0o600)

    return open(place, mode, opener=opener)


# Shared stores.


def open_member(root: Path, model: bytes) -> StoreDirectory:
    """Take the first folder of this model that no engine uses. Raises StoreRefused and OSError."""
    members = root / "members"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    expected = ("members", "secret", "lost+found")
    strangers = sorted(name for name in os.listdir(root) if not name.startswith(expected))
    if strangers:
        raise StoreRefused("strangers", f"{root} is no shared store: it has {strangers[0]}")
    members.mkdir(mode=0o700, exist_ok=True)
    root.chmod(0o700)
    # The members' secret. Where several make one at the same time, the first one's counts.
    place = root / "secret"
    if not place.exists():
        new = root / f"secret-{secrets.token_hex(8)}"
        with _opened(new, "xb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
            file.flush()
            os.fsync(file)
        with suppress(FileExistsError):
            os.link(new, place)
        new.unlink()
    secret = place.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise StoreRefused("unusable", f"{place} is damaged: delete the directory")
    for number in range(MAX_MEMBERS):
        try:
            directory = StoreDirectory(members / f"{model.hex()}-{number}", secret=secret)
        except StoreRefused as refused:
            if refused.reason != "in_use":
                raise
        else:
            break
    else:
        raise StoreRefused("in_use", f"{root} has {MAX_MEMBERS} members at work already")
    # Remove folders that no engine uses, and that nobody has written to for a long time.
    for path in members.iterdir():
        with suppress(OSError):
            journal = path / "journal"
            written = (journal if journal.exists() else path).stat().st_mtime
            if path == directory.path or time.time() - written < STALE_SECONDS:
                continue
            with _opened(path / "lock", "r+b") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
    return directory


def other_members(directory: StoreDirectory, model: bytes) -> list[Path]:
    """The folders of the same model that are other engines', at work or not."""
    return [
        path
        for path in sorted(directory.path.parent.glob(f"{model.hex()}-*"))
        if path != directory.path
    ]
