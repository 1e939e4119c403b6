"""Clients' texts in the database, encrypted: prompts, answers, batches and cached contents.

The cipher is AES-GCM. Its keys are derived from the master secret by HKDF: one for each workspace's
texts, and one for each batch. A body is bound to its place, and can't be read in another place.

Before revision 0003 rows of batches and cached contents were plain zlib streams. These begin with
another byte than a sealed body, and are read as they are until they have been sealed.
"""

import asyncio
import os
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from pydantic import SecretStr
from sqlalchemy import ColumnElement, delete, func, or_, select, text, update
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.ext.asyncio import AsyncConnection

from gateway.base.background import pause
from gateway.base.errors import GatewayError, NotFound
from gateway.base.logs import get_logger
from gateway.ledger.database import Ledger
from gateway.ledger.schema import BatchItemRow, CachedContentRow, WatermarkRow

MASTER = "master"
"""The watermark by which master secrets are told apart: 48 bits derived from the secret."""
OTHER_MASTER = (
    "HOLDFAST_MASTER_SECRET is another than this database was begun with: texts that it keeps can't"
    " be read, no cache entry and no prefix is found again; put the first one back"
)
UNSEALED = "unsealed"
"""The watermark that revision 0003 sets: there are plain rows to be sealed."""
PLAIN = b"\x78"
"""The first byte of a zlib stream (RFC 1950, 2.2) of any level."""

_NONCE_BYTES = 12
_MARK_BYTES = 6
_SEALED = b"\x01"
_SHARED_ENDS = frozenset({"canceled", "expired"})
_ROWS = 16
_PAUSE_SECONDS = 0.05
_RETRY_SECONDS = 5.0


class Cipher:
    """Seals with one derived key."""

    def __init__(self, master: SecretStr, use: str) -> None:
        derived = HKDF(SHA256(), 32, None, use.encode())
        self._aead = AESGCM(derived.derive(master.get_secret_value().encode()))

    def sealed(self, place: str, plain: bytes) -> bytes:
        nonce = os.urandom(_NONCE_BYTES)
        return nonce + self._aead.encrypt(nonce, plain, place.encode())

    def opened(self, place: str, body: bytes) -> bytes:
        """The plain body. Raise NotFound for a body of another place or another master secret."""
        nonce = body[:_NONCE_BYTES]
        try:
            return self._aead.decrypt(nonce, body[_NONCE_BYTES:], place.encode())
        except InvalidTag:
            raise NotFound("content: it was kept with another master secret") from None


def mark_of(master: SecretStr) -> int:
    """The number that the database stores for a master secret. It does not reveal the secret."""
    derived = HKDF(SHA256(), _MARK_BYTES, None, b"holdfast mark of the master secret")
    return int.from_bytes(derived.derive(master.get_secret_value().encode()), "big")


async def is_known_master(ledger: Ledger, master: SecretStr) -> bool:
    """Whether this is the database's master secret. A new database takes the first secret that it
    is asked about. Raise LedgerUnavailable without the database."""
    insert_into = postgresql.insert if ledger.is_postgres else sqlite.insert
    row = {"name": MASTER, "value": mark_of(master)}
    query = select(WatermarkRow.value).where(WatermarkRow.name == MASTER)
    async with ledger.transaction() as connection:
        await connection.execute(insert_into(WatermarkRow).values(row).on_conflict_do_nothing())
        return (await connection.execute(query)).scalar_one() == row["value"]


class Texts:
    """Seals rows of batches and cached contents. A plain body is opened as it is."""

    def __init__(self, master: SecretStr) -> None:
        self._master = master

    def batch(self, batch_id: str) -> "BatchTexts":
        return BatchTexts(Cipher(self._master, f"holdfast batch: {batch_id}"))

    def sealed_content(self, workspace: str, content_id: str, body: bytes) -> bytes:
        return _SEALED + self._contents_of(workspace).sealed(content_id, body)

    def opened_content(self, workspace: str, content_id: str, body: bytes) -> bytes:
        """The plain body. Raise NotFound for a body of another master secret."""
        return _opened(self._contents_of(workspace), content_id, body)

    def _contents_of(self, workspace: str) -> Cipher:
        return Cipher(self._master, f"holdfast cached contents: {workspace}")


class BatchTexts:
    """Seals the rows of one batch. Opening raises NotFound for a body of another master secret."""

    def __init__(self, cipher: Cipher) -> None:
        self._cipher = cipher

    def sealed_params(self, position: int, params: bytes) -> bytes:
        return _SEALED + self._cipher.sealed(f"params {position}", params)

    def opened_params(self, position: int, params: bytes) -> bytes:
        return _opened(self._cipher, f"params {position}", params)

    def sealed_result(self, position: int, status: str, result: bytes) -> bytes:
        return _SEALED + self._cipher.sealed(_result_place(position, status), result)

    def opened_result(self, position: int, status: str, result: bytes) -> bytes:
        return _opened(self._cipher, _result_place(position, status), result)


def _result_place(position: int, status: str) -> str:
    """The place of a result. Rows that never ran end together, with one result for all."""
    return f"result {status}" if status in _SHARED_ENDS else f"result {position}"


def _opened(cipher: Cipher, place: str, body: bytes) -> bytes:
    return cipher.opened(place, body[1:]) if body.startswith(_SEALED) else body


def _is_plain(column: ColumnElement[Any]) -> ColumnElement[bool]:
    return func.substr(column, 1, 1) == PLAIN


class Sealing:
    """Seals the rows from before revision 0003, some at a time, so that others can write in
    between. Rows that a kill leaves plain are sealed at the next start."""

    def __init__(self, ledger: Ledger, master: SecretStr) -> None:
        self._ledger = ledger
        self._master = master
        self._texts = Texts(master)
        # What is wrong with the master secret; None until the database has been asked.
        self.problem: str | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Run until all rows are sealed. While the database is away, try again. If the master
        secret is not the database's, nothing is sealed."""
        while not stopping.is_set():
            try:
                if not await is_known_master(self._ledger, self._master):
                    self.problem = OTHER_MASTER
                    get_logger("ledger").error("other_master_secret", error=OTHER_MASTER)
                    return
                if not await self.step():
                    return
                seconds = _PAUSE_SECONDS
            except GatewayError as error:
                get_logger("ledger").warning("texts_not_sealed", error=str(error))
                seconds = _RETRY_SECONDS
            await pause(stopping, seconds)

    async def step(self) -> bool:
        """Seal some rows; return whether there may be more."""
        async with self._ledger.transaction() as connection:
            if not await self._is_due(connection):
                return False
            if not self._ledger.is_postgres:
                # Zeros overwrite the plain texts in the file, so that none stays in a free page.
                await connection.execute(text("PRAGMA secure_delete = ON"))
            count = await self._seal_batches(connection)
            count += await self._seal_contents(connection)
            if count == 0:
                await connection.execute(delete(WatermarkRow).where(WatermarkRow.name == UNSEALED))
        if count == 0:
            await self._empty_log()
            get_logger("ledger").info("texts_sealed")
        return count > 0

    async def _is_due(self, connection: AsyncConnection) -> bool:
        query = select(WatermarkRow.value).where(WatermarkRow.name == UNSEALED)
        return (await connection.execute(query)).first() is not None

    async def _seal_batches(self, connection: AsyncConnection) -> int:
        row = BatchItemRow
        plain = or_(_is_plain(row.params.expression), _is_plain(row.result.expression))
        query = select(row.batch_id, row.position, row.status, row.params, row.result)
        rows = (await connection.execute(query.where(plain).limit(_ROWS))).all()
        for batch_id, position, status, params, result in rows:
            texts = self._texts.batch(batch_id)
            values: dict[str, bytes] = {}
            if params.startswith(PLAIN):
                values["params"] = await asyncio.to_thread(texts.sealed_params, position, params)
            if result is not None and result.startswith(PLAIN):
                sealed = await asyncio.to_thread(texts.sealed_result, position, status, result)
                values["result"] = sealed
            place = row.batch_id == batch_id, row.position == position, row.status == status
            await connection.execute(update(row).where(*place).values(values))
        return len(rows)

    async def _seal_contents(self, connection: AsyncConnection) -> int:
        row = CachedContentRow
        query = select(row.id, row.workspace_id, row.body).where(_is_plain(row.body.expression))
        rows = (await connection.execute(query.limit(_ROWS))).all()
        for content_id, workspace, body in rows:
            seal = self._texts.sealed_content
            sealed = await asyncio.to_thread(seal, workspace, content_id, body)
            await connection.execute(update(row).where(row.id == content_id).values(body=sealed))
        return len(rows)

    async def _empty_log(self) -> None:
        """Empty SQLite's log, which still has the plain texts. PostgreSQL's own vacuum removes the
        plain rows there."""
        if not self._ledger.is_postgres:
            async with self._ledger.transaction() as connection:
                await connection.commit()  # not within a transaction
                await connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)")
