"""The `vllm.general_plugins` entry point: vLLM runs it in each of its processes.

MultiConnector looks its children up by name, so the connector is registered; with
`kv_connector_module_path` it works alone without.
"""

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from engine.backends.vllm.arguments import MODULE, NAME


def register() -> None:
    """Make the connector known by its name, once or again."""
    try:
        KVConnectorFactory.get_connector_class_by_name(NAME)
    except ValueError:  # not registered yet
        KVConnectorFactory.register_connector(NAME, MODULE, NAME)
