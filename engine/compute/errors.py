"""Why a model is not served.

ModelRefused             it can't be loaded, or not be computed exactly: ends the start
"""


class ModelRefused(Exception):
    """The message is for the operator: what about the model is in the way."""
