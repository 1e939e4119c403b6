"""Why a model is not served.

ModelRefused it can't be loaded or computed exactly; the start ends
"""


class ModelRefused(Exception):
    """The message tells the operator which property of the model is not supported."""
