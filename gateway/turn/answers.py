"""What the client was answered, as the ledger keeps it."""

from gateway.base.errors import GatewayError
from gateway.dialects.openai.errors import status_of as openai_status_of
from gateway.prompt.ask import Api

ERROR_CHARACTERS = 300
"""The ledger keeps so much of an error's message."""


def status_of(error: GatewayError, api: Api) -> int:
    """The HTTP status of an error before the answer began. Google's are those of OpenAI."""
    return error.status if api == "anthropic" else openai_status_of(error)
