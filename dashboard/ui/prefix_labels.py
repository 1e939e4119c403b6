"""What a person can recognise a prefix by: its name, its first words, or its size.

First words come from a kept prompt, so only a viewer who may read prompts gets them.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from types import MappingProxyType

from dashboard.client import AdminClient, NotThere, segment
from dashboard.ui import formats, viewer
from gateway.structs.usage import KEPT, PrefixLook, TurnBeginning

NO_WORDS: Mapping[str, str] = MappingProxyType({})
NUM_WORDS = 20
"""The most prefixes of a page that are called by their first words. Each costs a request."""
WORDS_SECONDS = 60.0
"""The most seconds that first words may be shown after their prompt was deleted."""
NUM_DIGITS = 6
"""How many digits of a digest are shown. They tell the prefixes of one page apart."""


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
        with suppress(NotThere):  # the prompt was deleted, or is on its way to the database
            words[turn_id] = client.get(path, TurnBeginning, kept_seconds=WORDS_SECONDS).text
    return words


def entry_label(look: PrefixLook | None, tokens: int, digest: str, words: Mapping[str, str]) -> str:
    """The label of an entry that an engine holds: that of its prefix. If no request of the ledger
    ended with the entry, the label is its size."""
    if look is not None:
        return prefix_label(look, digest, words)
    return f"{formats.counted(tokens, 'token')} · {digest[:NUM_DIGITS]}"


def prefix_label(look: PrefixLook, digest: str = "", words: Mapping[str, str] = NO_WORDS) -> str:
    """The label of a prefix: its name, or else its first words, or else its number of blocks of
    each kind. The start of its digest follows first words and numbers."""
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
