"""The refusal of a start. It stands alone: what computes knows nothing of the protocol."""


class StartRefused(Exception):
    """The engine can't start as it was told to. The message is for the operator."""
