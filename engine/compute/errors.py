"""Why a model is not served.

ModelRefused it can't be loaded or computed exactly; the start ends
"""

from engine.errors import StartRefused


class ModelRefused(StartRefused):
    """The message tells the operator which property of the model is not supported."""
