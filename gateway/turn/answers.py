"""What the client was answered, as the ledger keeps it."""

from gateway.base.errors import DemandRefused, GatewayError
from gateway.dialects import errors
from gateway.prompt.ask import Api

ERROR_CHARACTERS = 300
"""The most characters of an error's message that the ledger keeps."""


def kept_text(error: GatewayError) -> str:
    """The message, as the ledger can hold it: cut, and without NUL.

    A refused schema is named by its place alone, because the reason quotes what the client wrote.
    """
    text = str(error)
    if isinstance(error, DemandRefused):
        text = f"{text.split(' ', 1)[0].rstrip(':')}: output can't be held to it"
    return text.replace("\x00", "")[:ERROR_CHARACTERS]


def status_of(error: GatewayError, api: Api) -> int:
    """The HTTP status of an error before the answer began. Google's are those of OpenAI."""
    return errors.status_of(error, "anthropic" if api == "anthropic" else "openai")
