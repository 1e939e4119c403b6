"""What a person can tell a prefix by: its name, its first words, or its size.

First words are a kept prompt's, so only a viewer who may read prompts gets them.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

from dashboard.client import AdminClient, NotThere, segment
from dashboard.ui import formats, viewer
from gateway.structs.usage import KEPT, PrefixLook, TurnBeginning

NO_WORDS: Mapping[str, str] = MappingProxyType({})
NUM_WORDS = 20
"""So many prefixes of a page are called by their first words. Each costs a request."""
WORDS_SECONDS = 60.0
"""How long first words may stand after their prompt was deleted, at most."""
NUM_DIGITS = 6
"""Of a digest: enough to tell the prefixes of one page apart."""


def first_words(client: AdminClient, looks: Iterable[PrefixLook | None]) -> dict[str, str]:
    """The first words of prefixes, by the id of their last request.

    A prefix has them if it has no name, its workspace keeps contents and the viewer may read them.
    At most `NUM_WORDS` prefixes are asked for. Raise ClientError.
    """
    if viewer.is_admin() and not viewer.may_change():
        return {}
    turns = [look.last_turn for look in looks if look and not look.name and look.content == KEPT]
    words: dict[str, str] = {}
    for turn_id in list(dict.fromkeys(turns))[:NUM_WORDS]:
        path = f"/admin/v1/turns/{segment(turn_id)}/content/beginning"
        with suppress(NotThere):  # it was deleted, or is on its way to the database
            words[turn_id] = client.get(path, TurnBeginning, kept_seconds=WORDS_SECONDS).text
    return words


def entry_label(look: PrefixLook | None, tokens: int, digest: str, words: Mapping[str, str]) -> str:
    """The label of an entry that an engine holds. Without a request of the ledger that ended with
    it, it is called by its size."""
    if look is not None:
        return prefix_label(look, digest, words)
    return f"{formats.counted(tokens, 'token')} · {digest[:NUM_DIGITS]}"


def prefix_label(look: PrefixLook, digest: str = "", words: Mapping[str, str] = NO_WORDS) -> str:
    """The name of a prefix. Without a name it is called by its first words, without words by its
    number of blocks of each kind; the start of its digest follows."""
    if look.name:
        return look.name
    beginning = words.get(look.last_turn)
    if beginning:
        return f"{beginning} · {digest[:NUM_DIGITS]}" if digest else beginning
    kinds = {
        "tool": look.num_tools,
        "system block": look.num_system,
        "message block": look.num_messages,
    }
    labels = [formats.counted(count, kind) for kind, count in kinds.items() if count]
    if look.tokens:
        labels.append(formats.counted(look.tokens, "token"))
    if digest:
        labels.append(digest[:NUM_DIGITS])
    return " · ".join(labels) or "a prompt that its client did not name"
