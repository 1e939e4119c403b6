"""The protocol's version, and the headers that its requests have besides their bodies."""

PROTOCOL_VERSION = 1
SCOPE_HEADER = "x-scope"
"""Names the scope of a generation or a count. Workers are shared fairly by it before a body is
read."""
EPOCH_HEADER = "x-epoch"
"""Names the epoch that a generation is meant for.

An engine of another epoch refuses it as `not_ready`. The gateway's knowledge is then of a process
that is gone.
"""
