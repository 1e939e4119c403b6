"""The entry points: `vllm.general_plugins`, which vLLM runs in each of its processes, and
`vllm.endpoint_plugins`. They import nothing that an environment may lack.

vLLM logs and ignores an entry point that can't be imported, and would serve without us. What
`attach_router` and `init_state` raise ends its start.
"""

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.mount.endpoint import MountedEngine


def register() -> None:
    """Make the connector known, and have a server that names us checked before it loads."""
    from engine.backends.vllm import plugin

    plugin.register()
    plugin.check_before_loading(check)


def check(config: Any, log_stats: bool) -> None:
    """Raises RuntimeError for a missing package or setting, and where no lease can be held."""
    try:
        from engine.mount import checks
    except ImportError as error:
        raise RuntimeError(f"holdfast can't be mounted: {error}") from error
    checks.check(config, checks.read_settings(), log_stats=log_stats)


class HoldfastPlugin:
    name = "holdfast"
    required_tasks = ("generate",)
    _engine: "MountedEngine"

    def attach_router(self, app: Any) -> None:
        """Mount our routes. Raises RuntimeError for a missing package or a wrong setting."""
        try:
            from engine.mount.endpoint import MountedEngine
        except ImportError as error:
            raise RuntimeError(f"holdfast can't be mounted: {error}") from error
        self._engine = MountedEngine()
        self._engine.attach_router(app)

    async def init_state(self, engine_client: Any, state: Any, args: Namespace) -> None:
        """Raises Refused where leases can't be held in this vLLM."""
        await self._engine.init_state(engine_client, args)
