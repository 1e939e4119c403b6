"""Why a model is not served."""

from engine.refusal import StartRefused


class ModelRefused(StartRefused):
    """It can't be loaded or computed exactly: the message tells the operator why."""
