"""Why a model is not served, and how a step ends early.

ModelRefused it can't be loaded or computed exactly; the start ends
StepStopped  the step in progress was stopped; its keys and values are undefined
"""

from engine.refusal import StartRefused


class ModelRefused(StartRefused):
    """The message tells the operator which property of the model is not supported."""


class StepStopped(Exception):
    """Raised within a forward, and never out of the runner."""
