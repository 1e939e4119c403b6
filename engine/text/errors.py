"""Why a prompt or a model's prompt files are of no use.

TemplateRefused          the files can't be used: ends the start
InvalidRequest           (engine.errors) the template refuses this prompt: 400
"""

from engine.refusal import StartRefused


class TemplateRefused(StartRefused):
    """The message is for the operator: what is missing or wrong in the model's files."""
