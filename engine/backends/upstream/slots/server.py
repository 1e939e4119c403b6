"""The calls that leases need of llama.cpp's server besides answers: to its slots."""

from typing import Any, TypeVar

import msgspec

from engine.backends.external import Order
from engine.backends.upstream.server import ANYWHERE, Place, UpstreamError
from engine.backends.upstream.servers import LlamaCppServer, Piece

T = TypeVar("T")

BATCH_SECONDS = 300.0
"""How long the server may compute before it looks at anything else. It computes a batch of up to
2,048 tokens (`-b`) of others' prompts at once, and calls to slots wait for that."""
DISK_BYTES_A_SECOND = 16 * 2**20
"""What a slow disk writes or reads in a second."""


class SlotState(msgspec.Struct):
    """A slot, as `GET /slots` tells it."""

    id: int
    n_ctx: int = 0
    is_processing: bool = False
    speculative: bool = False
    # None: nothing ran in it since the server was started.
    id_task: int | None = None


class Modalities(msgspec.Struct, frozen=True):
    vision: bool = False
    audio: bool = False
    video: bool = False


class SlotProps(msgspec.Struct):
    """The fields of `GET /props` that leases need."""

    total_slots: int
    model_path: str = ""
    build_info: str = ""
    modalities: Modalities = Modalities()
    endpoint_slots: bool = True


class _SavedReply(msgspec.Struct):
    n_saved: int
    n_written: int


class _RestoredReply(msgspec.Struct):
    n_restored: int


class SlotServer(LlamaCppServer):
    """A llama.cpp server whose slots are saved in files.

    Every call must name a slot in which nothing runs, because a call that waits for its slot may
    hang.
    """

    def _piece(self, event: Any, order: Order, place: Place) -> Piece | None:
        # Events of progress give pieces too, so that a request that nobody waits for can be ended.
        return super()._piece(event, order, place) or Piece()

    async def prefill(self, order: Order, place: Place = ANYWHERE) -> Piece:
        """Compute a prompt to its end, so that the slot has exactly its tokens."""
        first: Piece | None = None
        async for piece in self.generate(order, place):
            if first is None and piece.cached_tokens is not None:
                first = piece
        if first is None:
            raise UpstreamError("a prompt was computed without counts")
        return first

    @property
    def url(self) -> str:
        return self._wire.url

    async def fingerprint(self) -> str:
        """The text also shows that nothing has run in any slot.

        That is only so after a new start, because the trial ran in the first slot.
        """
        model = await super().fingerprint()
        states = await self.states()
        is_new = all(state.id_task is None for state in states)
        return f"{model} new" if is_new else model

    async def save(self, slot: int, name: str, num_bytes: int = 0) -> tuple[int, int]:
        """Save a slot's content of about `num_bytes`.

        Return the number of its tokens, and of the file's bytes.
        """
        reply = await self._act(slot, "save", _SavedReply, {"filename": name}, num_bytes)
        return reply.n_saved, reply.n_written

    async def restore(self, slot: int, name: str, num_bytes: int = 0) -> int:
        """Fill a slot from a file of `num_bytes`. Return the number of its tokens.

        Raises UpstreamRejected for a file that the server does not take. The slot is then empty.
        """
        reply = await self._act(slot, "restore", _RestoredReply, {"filename": name}, num_bytes)
        return reply.n_restored

    async def erase(self, slot: int) -> None:
        await self._act(slot, "erase", dict[str, Any], {})

    async def states(self) -> list[SlotState]:
        return await self._wire.ask("/slots", list[SlotState], seconds=BATCH_SECONDS)

    async def props(self) -> SlotProps:
        return await self._wire.ask("/props", SlotProps)

    async def adapters(self) -> int:
        """How many LoRA adapters the server has loaded."""
        status, answer = await self._wire.look("/lora-adapters")
        return len(msgspec.json.decode(answer, type=list[Any])) if status == 200 else 0

    async def _act(
        self, slot: int, action: str, kind: type[T], body: dict[str, str], num_bytes: int = 0
    ) -> T:
        path = f"/slots/{slot}?action={action}"
        seconds = BATCH_SECONDS + num_bytes / DISK_BYTES_A_SECOND
        return await self._wire.ask(path, kind, body, seconds=seconds)
