"""The entry points of the plugin. This module imports nothing that an environment may lack.

vLLM runs `register` (`vllm.general_plugins`) in each of its processes, and HoldfastPlugin
(`vllm.endpoint_plugins`) in its server. If an entry point can't be imported, vLLM only logs that
and serves without us. An error that `attach_router` or `init_state` raises ends vLLM's start.
"""

from argparse import Namespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.mount.endpoint import MountedEngine


def register() -> None:
    """Make the connector known. Have a server checked before it loads if VLLM_PLUGINS names us."""
    from engine.backends.vllm import plugin

    plugin.register()
    plugin.check_before_loading(check)


def check(config: Any, log_stats: bool) -> None:
    """Raise RuntimeError for a missing package, a wrong setting, or if no lease can be held."""
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
        """Make the engine over vLLM's. Raises Refused if leases can't be held in this vLLM."""
        await self._engine.init_state(engine_client, args)
