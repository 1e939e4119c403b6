"""The gateway's findings about a turn, in the Anthropic dialect's shapes."""

from gateway.dialects.anthropic.lower import prompt_parameters
from gateway.dialects.anthropic.request import MessagesRequest
from gateway.dialects.anthropic.response import Diagnostics, PreviousMessageNotFound, changed
from gateway.prompt.ask import Compared
from gateway.turn.turn import Findings


def diagnostics_of(findings: Findings) -> Diagnostics | None:
    """The wire's None stands for "no divergence", "not asked for" and "first turn"."""
    diagnosis = findings.diagnosis
    report: Diagnostics | None = None
    if diagnosis is not None:
        match diagnosis.found:
            case "unfinished":
                report = Diagnostics(None)
            case "not_found":
                report = Diagnostics(PreviousMessageNotFound())
            case "compared" if diagnosis.divergence is not None:
                divergence = diagnosis.divergence
                report = changed(divergence.kind, divergence.missed_tokens)
    return report


def compared(request: MessagesRequest, betas: str) -> Compared:
    """`betas` is the header as it came."""
    asked = request.diagnostics
    return Compared(
        is_wanted=asked is not None,
        previous=asked.previous_message_id if asked else None,
        parameters=prompt_parameters(request, betas),
    )
