"""The ids of the turns of batches' rows, and of their tries.

A row's turn has one id over all tries, whichever gateway runs it: it is the client's and the
ledger's. A try has an id of its own at the journal and at engines. It begins as every id of its
gateway does, and contains the digits of the turn's id.
"""

import secrets
from hashlib import sha256

_DIGITS = 28
_PREFIX = "msg_"
_INSTANCE_DIGITS = 8
MARK = "_"
"""Stands in a try's id behind its gateway's instance, where other ids have a digit."""
MARK_PLACE = len(_PREFIX) + _INSTANCE_DIGITS


def row_turn_id(batch_id: str, position: int) -> str:
    """The id of a row's turn."""
    digest = sha256(f"{batch_id} {position}".encode()).hexdigest()
    return f"{_PREFIX}{digest[:_DIGITS]}"


def new_try_id(instance: str, turn_id: str) -> str:
    """A new id for a try of a row's turn at the gateway `instance`."""
    row = turn_id.removeprefix(_PREFIX)
    return f"{_PREFIX}{instance}{MARK}{row}{secrets.token_hex(4)}"


def is_try(turn_id: str) -> bool:
    """Whether an id of a journal or an engine is a try's."""
    return turn_id[MARK_PLACE : MARK_PLACE + 1] == MARK


def turn_of_try(try_id: str) -> str:
    """The id of the row's turn."""
    start = MARK_PLACE + 1
    return f"{_PREFIX}{try_id[start : start + _DIGITS]}"
