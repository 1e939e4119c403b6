"""A store that several engines of one model share: one folder a member, one secret for all.

    secret                   of all members
    members/MODEL-N/         a store's directory (`directory.py`), written by one engine alone

A member writes and deletes in its own folder only, under its lock, so that concurrent writers,
crashes and other versions never meet in a file. All members read all folders of their model. Files
are told by names that follow from the secret and the content, and are verified as one's own are.
"""

import fcntl
import os
import secrets
import shutil
import time
from contextlib import suppress
from pathlib import Path

from engine.store.directory import StoreDirectory, StoreRefused
from engine.store.keys import SECRET_BYTES

MAX_MEMBERS = 64
_OWN = ("members", "secret", "lost+found")
STALE_SECONDS = 4 * 3600.0
"""A member that no engine uses is removed after this time. No lease lasts longer."""


def open_member(root: Path, model: bytes) -> StoreDirectory:
    """Take the first folder of this model that no engine uses. Raises StoreRefused and OSError."""
    members = root / "members"
    root.mkdir(mode=0o700, parents=True, exist_ok=True)
    strangers = sorted(one for one in os.listdir(root) if not one.startswith(_OWN))
    if strangers:
        raise StoreRefused("strangers", f"{root} is no shared store: it has {strangers[0]}")
    members.mkdir(mode=0o700, exist_ok=True)
    root.chmod(0o700)
    secret = _secret(root)
    found = None
    for number in range(MAX_MEMBERS):
        try:
            found = StoreDirectory(members / f"{model.hex()}-{number}", secret=secret)
            break
        except StoreRefused as refused:
            if refused.reason != "in_use":
                raise
    if found is None:
        raise StoreRefused("in_use", f"{root} has {MAX_MEMBERS} members at work already")
    remove_stale(members, besides=found.path)
    return found


def other_members(own: StoreDirectory, model: bytes) -> list[Path]:
    """The folders of the same model that are other engines', at work or not."""
    found = sorted(own.path.parent.glob(f"{model.hex()}-*"))
    return [path for path in found if path != own.path]


def remove_stale(members: Path, besides: Path) -> None:
    """Remove folders that no engine uses, and that nobody has written to for STALE_SECONDS."""
    for path in members.iterdir():
        with suppress(OSError):
            journal = path / "journal"
            written = (journal if journal.exists() else path).stat().st_mtime
            if path == besides or time.time() - written < STALE_SECONDS:
                continue
            lock = os.open(path / "lock", os.O_RDWR | os.O_CLOEXEC)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(lock)


def _secret(root: Path) -> bytes:
    """The members' secret: of those that make one at the same time, the first one's."""
    place = root / "secret"
    if not place.exists():
        new = root / f"secret-{secrets.token_hex(8)}"
        file = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            os.write(file, secrets.token_bytes(SECRET_BYTES))
            os.fsync(file)
        finally:
            os.close(file)
        with suppress(FileExistsError):
            os.link(new, place)
        new.unlink()
    secret = place.read_bytes()
    if len(secret) != SECRET_BYTES:
        raise StoreRefused("unusable", f"{place} is damaged: delete the directory")
    return secret
