"""What a token of a prompt costs in time: the slope of a fit, and not an average.

A step has a fixed cost, and a step that prefills may also decode. So where prompts are short, the
time of prompts divided by their tokens is more than the time of a token: on average, each token of
a turn that reads all but 15 tokens takes 3 ms. The fit is seconds = a + b · tokens prefilled + c ·
choices decoded, over steps. `b` is the time of a token, and `a` is the fixed cost of a step. A step
that only prefills would not have run without its tokens, so they bear its `a` too. The tokens of a
step that also decodes do not.
"""

from collections.abc import Iterable
from math import sqrt

from engine.protocol.reports import PrefillSums

MIN_PREFILLS = 5
"""The fewest observations. With fewer the time of a token is not known."""
MAX_ERROR = 0.2
"""The largest standard error, as a part of the time. With a larger one the time is not known."""


def slope(sums: PrefillSums) -> float | None:
    """The marginal seconds of a token; None where too little was seen to tell.

    Ordinary least squares with an intercept and two regressors, by the sums of squares about the
    means. If all steps decoded the same number of choices, there is one regressor.
    """
    count = sums.observations
    if sums.prefills < MIN_PREFILLS or count < MIN_PREFILLS:
        return None
    tokens_tokens = sums.tokens_tokens - sums.tokens * sums.tokens / count
    tokens_decodes = sums.tokens_decodes - sums.tokens * sums.decodes / count
    decodes_decodes = sums.decodes_decodes - sums.decodes * sums.decodes / count
    tokens_seconds = sums.tokens_seconds - sums.tokens * sums.seconds / count
    decodes_seconds = sums.decodes_seconds - sums.decodes * sums.seconds / count
    seconds_seconds = sums.seconds_seconds - sums.seconds * sums.seconds / count
    # The part of the tokens' variation that the decoded choices do not explain.
    explained = tokens_decodes**2 / decodes_decodes if decodes_decodes > 0 else 0.0
    fitted = tokens_tokens - explained
    if fitted <= 1e-9 * max(sums.tokens_tokens, 1.0):
        return None
    shared = tokens_decodes * decodes_seconds / decodes_decodes if decodes_decodes > 0 else 0.0
    per_token = (tokens_seconds - shared) / fitted
    per_decode = 0.0
    if decodes_decodes > 0:
        per_decode = (decodes_seconds - per_token * tokens_decodes) / decodes_decodes
    rest = seconds_seconds - per_token * tokens_seconds - per_decode * decodes_seconds
    degrees = count - 2 - (decodes_decodes > 0)
    error = sqrt(max(rest, 0.0) / degrees / fitted)
    if per_token <= 0 or error > MAX_ERROR * per_token:
        return None
    fixed = (sums.seconds - per_token * sums.tokens - per_decode * sums.decodes) / count
    # The size of the step that a token is computed in, on the mean over tokens: short steps, which
    # compute what a read left over, hardly count.
    step_tokens = sums.tokens_tokens / sums.tokens
    unshared = sums.unshared_tokens / sums.tokens
    return per_token + max(fixed, 0.0) / step_tokens * unshared


def added(parts: Iterable[PrefillSums]) -> PrefillSums:
    """The sums over the observations of all."""
    whole = PrefillSums()
    for part in parts:
        for name in PrefillSums.__struct_fields__:
            setattr(whole, name, getattr(whole, name) + getattr(part, name))
    return whole
