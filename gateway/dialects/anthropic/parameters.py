"""The parameters that shape a prompt besides its content, in one canonical form to compare."""

import msgspec

from gateway.dialects.anthropic.request import (
    ChoiceAuto,
    CountTokensRequest,
    ThinkingDisabled,
)

_DEFAULT_EFFORT = "high"


def prompt_parameters(request: CountTokensRequest, betas: str = "") -> bytes:
    """The form is equal for equal requests: a default that is written out counts as left out."""
    choice, thinking, output = request.tool_choice, request.thinking, request.output_config
    return msgspec.json.encode(
        [
            None if choice == ChoiceAuto() else choice,
            None if isinstance(thinking, ThinkingDisabled) else thinking,
            (output.effort if output else None) or _DEFAULT_EFFORT,
            request.form,
            sorted({beta.strip() for beta in betas.split(",")} - {""}),
        ]
    )
