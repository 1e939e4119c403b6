"""Tries at the start whether a server's slots can be saved and restored, as leases need.

The server's version and command line prove nothing. `/props` and `/slots` are read, and the rest is
tried in its slots. A refusal names the flag that the server must be started with.
"""

import asyncio
import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import structlog

from engine.backends.upstream.images import trial_order, trial_request
from engine.backends.upstream.server import (
    Facts,
    Place,
    UpstreamBusy,
    UpstreamError,
    UpstreamGone,
)
from engine.backends.upstream.slots.books import FileSizes
from engine.backends.upstream.slots.files import new_part
from engine.backends.upstream.slots.gguf import ModelFile, read_model
from engine.backends.upstream.slots.processes import gpu_of
from engine.backends.upstream.slots.server import SlotProps, SlotServer, SlotState
from engine.cache.ids import TokenId
from engine.store.files import StoreRefused, fingerprint
from engine.text.renderer import ChatRenderer

log = structlog.get_logger()

FLAGS = "-np N --cache-ram 0 --no-cache-idle-slots --slot-save-path DIR"
"""The flags of a server that keeps leases."""
TRIED_WORDS = 40
REST_SECONDS = 30.0
"""How long the slots may be busy at the start. Nobody but this engine should use them."""
_TAIL = 24
_HEADER = struct.Struct("<4sII")


class NoLeases(StoreRefused):
    """Leases are off. The message says why, and which flag of the server changes that."""

    def __init__(self, message: str) -> None:
        super().__init__("server_flags", message)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotTrial:
    """What the trial has shown."""

    sizes: FileSizes
    # A digest of all that a file's content depends on besides its tokens.
    fingerprint: bytes
    # Whether the server can cut a slot back to a prefix.
    may_trim: bool
    # For people.
    note: str


class _Prompts(NamedTuple):
    """Token ids of the trial's prompts. They never change, so equal servers give equal files."""

    first: list[TokenId]
    other: list[TokenId]
    tail: list[TokenId]

    @property
    def longer(self) -> list[TokenId]:
        return [*self.first, *self.tail]

    @property
    def cut(self) -> list[TokenId]:
        """The first prompt, with other tokens in place of its last ones."""
        return [*self.first[:-_TAIL], *self.tail]


async def try_leases(
    server: SlotServer, renderer: ChatRenderer, facts: Facts, folder: Path
) -> SlotTrial:
    """Try a server whose slots are saved in `folder`. Nobody else may use its slots meanwhile.

    Raises NoLeases, OSError if the folder can't be used, and UpstreamGone or UpstreamBusy if the
    server does not answer now.
    """
    try:
        props = await server.props()
        await _check_told(server, props)
        model = await _read_model(props.model_path)
        trial = _Trial(server, renderer, facts, folder)
        return await trial.run(props, model)
    except (UpstreamGone, UpstreamBusy):
        raise
    except UpstreamError as error:
        raise NoLeases(str(error)) from None


async def _check_told(server: SlotServer, props: SlotProps) -> None:
    """Raise NoLeases for something in the server's own report that leases can't have."""
    seen = props.modalities
    if seen.vision or seen.audio or seen.video:
        raise NoLeases("images were not tried with slot files: start it without --mmproj")
    if not props.endpoint_slots:
        raise NoLeases("GET /slots is off: start it without --no-slots")
    if await server.adapters():
        raise NoLeases("adapters were not tried with slot files: start it without --lora")
    states = await _states_at_rest(server)
    if len(states) != props.total_slots:
        raise NoLeases("GET /slots tells another number of slots than /props")
    if any(state.speculative for state in states):
        raise NoLeases("drafts were not tried with slot files: start it without --model-draft")
    device = await asyncio.to_thread(gpu_of, server.url)
    if device:
        raise NoLeases(
            f"a GPU was not tried with slot files ({device}): start a build for the CPU alone"
        )


async def _states_at_rest(server: SlotServer) -> Sequence[SlotState]:
    end = asyncio.get_running_loop().time() + REST_SECONDS
    while True:
        states = await server.states()
        if not any(state.is_processing for state in states):
            return states
        if asyncio.get_running_loop().time() > end:
            raise NoLeases("somebody else uses the server: its slots are busy")
        await asyncio.sleep(0.1)


async def _read_model(path: str) -> ModelFile:
    if not Path(path).is_absolute():
        raise NoLeases(f"the model's file is not known here ({path}): start it with -m and a path")
    try:
        return await asyncio.to_thread(read_model, Path(path))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise NoLeases(f"the model's file can't be read here: {path}: {why}") from None


class _Trial:
    """The trial of one server. It runs in the first two slots, which nobody else may use."""

    def __init__(
        self, server: SlotServer, renderer: ChatRenderer, facts: Facts, folder: Path
    ) -> None:
        self._server = server
        self._folder = folder
        self._facts = facts
        self._order = trial_order(renderer, trial_request("Say hello."))
        self._prompts = _prompts_of(renderer)
        self._parts: list[str] = []

    async def run(self, props: SlotProps, model: ModelFile) -> SlotTrial:
        try:
            return await self._run(props, model)
        finally:
            for part in self._parts:
                (self._folder / part).unlink(missing_ok=True)

    async def _run(self, props: SlotProps, model: ModelFile) -> SlotTrial:
        prompts = self._prompts
        num_first = len(prompts.first)
        await self._erase_all(props.total_slots)
        await self._expect_nothing(prompts.first)
        content = await self._save(num_first)
        self._check_streams(content, props.total_slots)
        short = len(content)
        await self._check_idle_slots(props.total_slots)
        long = len(await self._save(len(prompts.longer)))
        await self._check_ram(prompts)
        # A restored slot must have exactly the tokens that it was saved with.
        part = self._parts[0]
        await self._server.erase(0)
        await self._server.restore(0, part)
        if await self._reused(prompts.longer) != num_first:
            raise NoLeases(
                "a slot file was not read to its end, as with sliding windows: start it with "
                "--swa-full"
            )
        await self._server.restore(0, part)
        may_trim = await self._reused(prompts.cut) == num_first - _TAIL
        token_bytes = (long - short) / len(prompts.tail)
        await self._server.erase(0)
        state = hashlib.sha256(content).hexdigest()
        return SlotTrial(
            sizes=FileSizes(max(short - int(token_bytes * num_first), 0), token_bytes),
            fingerprint=fingerprint(_facts_of(props, model, self._facts, state)),
            may_trim=may_trim and model.has_full_attention,
            note=f"leases in slot files, {token_bytes / 1024:.1f} KiB a token",
        )

    async def _erase_all(self, num_slots: int) -> None:
        try:
            for number in range(num_slots):
                await self._server.erase(number)
        except UpstreamError as error:
            if isinstance(error, UpstreamGone | UpstreamBusy):
                raise
            raise NoLeases(
                f"slots take no actions ({error}): start it with --slot-save-path {self._folder}"
            ) from None

    async def _expect_nothing(self, tokens: Sequence[TokenId]) -> None:
        if await self._reused(tokens):
            raise NoLeases("an erased slot still had a prompt: start it with --cache-ram 0")

    async def _check_idle_slots(self, num_slots: int) -> None:
        """Raise NoLeases if a slot loses its content while another one works.

        The first slot has the longer prompt afterwards.
        """
        if num_slots > 1:
            await self._reused(self._prompts.other, slot=1)
        if await self._reused(self._prompts.longer) != len(self._prompts.first):
            raise NoLeases(
                "a slot lost its content to another one: start it with --no-cache-idle-slots and "
                "without --kv-unified"
            )

    async def _check_ram(self, prompts: _Prompts) -> None:
        """Raise NoLeases if an erased slot's content was kept somewhere else."""
        await self._server.erase(0)
        await self._reused(prompts.other)
        await self._server.erase(0)
        await self._expect_nothing(prompts.longer)

    def _check_streams(self, content: bytes, num_slots: int) -> None:
        """Raise NoLeases if the slots share one cache. A file tells the number of its streams."""
        _, _, num_tokens = _HEADER.unpack_from(content)
        place = _HEADER.size + 4 * num_tokens
        (num_streams,) = struct.unpack_from("<I", content, place)
        if num_streams != num_slots:
            raise NoLeases("its slots share a cache: start it with -np N and no --kv-unified")

    async def _reused(self, tokens: Sequence[TokenId], slot: int = 0) -> int:
        order = replace(self._order, order_id=uuid4().hex, token_ids=tokens, max_tokens=1)
        piece = await self._server.prefill(order, Place(slot, True))
        return piece.cached_tokens or 0

    async def _save(self, num_tokens: int) -> bytes:
        """Save the first slot, which must have `num_tokens` tokens. Returns the file's bytes.

        Raises NoLeases, UpstreamGone and UpstreamBusy.
        """
        part = new_part()
        self._parts.append(part)
        try:
            num_saved, num_written = await self._server.save(0, part)
        except UpstreamError as error:
            if isinstance(error, UpstreamGone | UpstreamBusy):
                raise
            raise NoLeases(
                f"a slot can't be saved ({error}): start it with --slot-save-path {self._folder}"
            ) from None
        if num_saved != num_tokens:
            raise NoLeases(f"a slot of {num_tokens} tokens was saved with {num_saved}")
        try:
            content = await asyncio.to_thread(_read, self._folder / part)
        except FileNotFoundError:
            raise NoLeases(
                f"a slot file came into another directory: start it with --slot-save-path "
                f"{self._folder}"
            ) from None
        except OSError as error:
            raise NoLeases(f"a slot file can't be read here: {error.strerror}") from None
        if len(content) != num_written:
            raise NoLeases(f"a slot file has {len(content)} bytes, and {num_written} were told")
        return content


def _prompts_of(renderer: ChatRenderer) -> _Prompts:
    def tokens_of(word: str, count: int) -> list[TokenId]:
        text = " ".join(f"{word} {number}" for number in range(count))
        ids = renderer.tokenizer.encode(text, add_special_tokens=False).ids
        return [TokenId(token) for token in ids]

    tail = tokens_of("tail", TRIED_WORDS)
    return _Prompts(tokens_of("first", 2 * TRIED_WORDS), tokens_of("other", TRIED_WORDS), tail)


def _read(place: Path) -> bytes:
    descriptor = os.open(place, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        os.fchmod(file.fileno(), 0o600)
        return file.read()


def _facts_of(props: SlotProps, model: ModelFile, facts: Facts, state: str) -> Mapping[str, str]:
    """All that a slot file's content depends on besides its tokens.

    `state` is the digest of a file of one fixed prompt. It changes with the weights, the cache's
    type and layout, rope, flash attention and anything else that shapes the content.
    """
    return {
        "model": model.digest,
        "build": props.build_info,
        "slots": str(props.total_slots),
        "context": str(facts.max_context_tokens),
        "state": state,
    }
