"""Ends the leases of cached contents whose time is over or that were deleted.

An engine ends a lease by itself at the time that it was told. The sweep ends leases before that:
after a deletion, or after an update to an earlier end.
"""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from gateway.admission.keyring import KeyRing
from gateway.base.background import repeat
from gateway.base.catalogue import Catalogue
from gateway.base.clock import Clock
from gateway.base.errors import GatewayError
from gateway.ledger.cached_contents import CachedContent, CachedContents
from gateway.routing.engine import Engine
from gateway.routing.fleet import Fleet

_TICK_SECONDS = 1.0


@dataclass(frozen=True, slots=True)
class Sweep:
    contents: CachedContents
    fleet: Fleet
    keyring: KeyRing
    catalogue: Catalogue
    clock: Clock

    async def run(self, stopping: asyncio.Event) -> None:
        async def sweep() -> None:
            await self.end(await self.contents.expired(self.clock.wall()))

        await repeat(stopping, _TICK_SECONDS, sweep, "sweep_failed")

    async def end(self, contents: Sequence[CachedContent]) -> None:
        """Drop the leases of expired contents, then forget them."""
        if not contents:
            return
        now = self.clock.wall()
        prefixes = {content.prefix for content in contents if content.held_until > now}
        live = await self.contents.named(prefixes, now)
        for content in contents:
            is_live = (content.workspace_id, content.prefix) in live
            if content.prefix in prefixes and not is_live:
                # An engine that is away has lost the lease, or ends it at the time it was told.
                for engine in self.fleet.ready:
                    with suppress(GatewayError):
                        await self._drop(engine, content)
        await self.contents.remove([content.id for content in contents])

    async def _drop(self, engine: Engine, content: CachedContent) -> None:
        """Drop the content's entries on one engine, if it serves the content's model."""
        model = self.catalogue.find(content.model, self.fleet.served)
        description = engine.description
        if description is None or not model.is_served_by(description.model):
            return
        scope = self.keyring.scope_of(content.workspace_id)
        for entry in await engine.entries(scope):
            if entry.scope == scope and entry.name == content.prefix:
                await engine.release(scope, entry.entry)
