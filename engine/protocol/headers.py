"""What identifies the protocol and its requests beside their bodies."""

PROTOCOL_VERSION = 1
SCOPE_HEADER = "x-scope"
"""Names the scope of a generation or a count, so that workers are shared fairly before a body is
read."""
EPOCH_HEADER = "x-epoch"
"""Names the epoch that a generation is meant for. An engine of another epoch refuses it as
`not_ready`: the gateway then knows only a process that is gone, and its model."""
