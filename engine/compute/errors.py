"""Why a model is not served."""

from engine.refusal import StartRefused


class ModelRefused(StartRefused):
    """The model can't be loaded or can't be computed exactly. The message tells why."""
