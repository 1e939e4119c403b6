"""A decoder's complaint, taken apart. What it quotes of a body may be as long as the body."""

_MARK = " - at `$"
_MAX_PATH = 256
"""No path of a request's own fields is as long."""


def split_complaint(complaint: str) -> tuple[str, str]:
    """What is wrong, and the path of where, such as `.messages[0].role`; "" for the whole body."""
    what, mark, path = complaint.rpartition(_MARK)
    if mark and path.endswith("`") and len(path) <= _MAX_PATH:
        return what, path[:-1]
    return complaint, ""
