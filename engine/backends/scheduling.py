"""The composition of one engine's scheduler, with speculation where the settings ask for it."""

from engine.backends.base import Parts
from engine.cache.prefix_cache import PrefixCache
from engine.protocol import Description
from engine.schedule.scheduler import Scheduler
from engine.schedule.speculation import Speculation
from engine.settings import Settings


def new_scheduler(
    settings: Settings, parts: Parts, description: Description, cache: PrefixCache
) -> Scheduler:
    max_step_tokens = settings.max_step_tokens or parts.step_tokens
    speculation = None
    if parts.new_drafter is not None:
        speculation = Speculation(
            parts.new_drafter,
            max_step_tokens=max_step_tokens,
            max_context_tokens=description.max_context_tokens,
        )
    return Scheduler(
        cache,
        max_step_tokens=max_step_tokens,
        max_running=settings.max_running,
        speculation=speculation,
    )
