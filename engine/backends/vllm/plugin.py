"""What we add to vLLM before it starts: the connector's name, and a check of its configuration.

MultiConnector looks its children up by name, so the connector is registered. Alone it also works
without that, by its `kv_connector_module_path`. This module imports no module of ours that needs a
package which an environment may lack.
"""

import functools
from collections.abc import Callable
from typing import Any

from vllm import envs
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.logger import init_logger

from engine.backends.vllm.arguments import MODULE, NAME

PLUGIN = "holdfast"
"""The name by which VLLM_PLUGINS asks for our routes."""
Check = Callable[[Any, bool], None]
"""Raises RuntimeError for a VllmConfig in which leases can't be held. The flag is `log_stats`."""
logger = init_logger(f"vllm.{__name__}")


def register() -> None:
    """Make the connector known by its name. It does no harm to do so again."""
    try:
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except ValueError:  # not registered yet
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)


def check_before_loading(check: Check) -> None:
    """Have a server's configuration checked when it is made, before any weight is read.

    This happens only if VLLM_PLUGINS names us. vLLM has no hook there, so AsyncEngineArgs gets one,
    once. A refusal ends the process with one line. After any other error the load goes on, and the
    same check comes again behind it.
    """
    create = AsyncEngineArgs.create_engine_config
    if hasattr(create, "__wrapped__"):
        return

    @functools.wraps(create)
    def create_and_check(self: AsyncEngineArgs, *args: Any, **kwargs: Any) -> Any:
        config = create(self, *args, **kwargs)
        if PLUGIN in (envs.VLLM_PLUGINS or ()):
            try:
                check(config, not self.disable_log_stats)
            except RuntimeError as refusal:
                raise SystemExit(str(refusal)) from None
            except (AttributeError, LookupError, TypeError, ValueError) as error:
                # A vLLM whose configuration we don't know yet.
                logger.warning("Not checked before loading: %s", type(error).__name__)
        return config

    setattr(AsyncEngineArgs, create.__name__, create_and_check)
