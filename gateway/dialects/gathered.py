"""The bound on answers that are gathered before they are sent, in every dialect.

The text of an answer is short. With the log probabilities of its tokens it is a thousand times as
long, and all of them are in memory until the answer is whole.
"""

from gateway.base.bounds import RequestBounds
from gateway.base.errors import InvalidRequest


def bounded_tokens(
    asked: int | None, num_probs: int, bounds: RequestBounds, *, field: str, param: str | None
) -> int:
    """The most tokens that each choice of the answer may have.

    `asked` is the request's limit, None without one: then the answer ends at the bound. `num_probs`
    are the log probabilities of one token in all choices. Raise InvalidRequest for a higher limit.
    """
    most = max(bounds.max_logprobs // num_probs, 1)
    if asked is None:
        return most
    if asked > most:
        raise InvalidRequest(
            f"{field}: must be at most {most} with so many log probabilities in an answer that is"
            f" gathered: {num_probs} of each token, {bounds.max_logprobs} in all",
            param,
        )
    return asked
