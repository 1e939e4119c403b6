"""The identity of a model, which tells it from another one of the same name.

A gateway compares the identities of two engines of one name. So an identity is the same in every
process, with every version of torch, vLLM and tokenizers.
"""

import math
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

from engine.protocol.reports import ModelIdentity
from engine.text.files import model_folder
from engine.text.renderer import ChatRenderer

MAX_READ_BYTES = 1 << 30
"""How much of larger weights is read, in evenly spaced pieces. A start waits about a second for
it."""
_PIECE_BYTES = 1 << 16
# The first kind of file that a folder has is loaded.
_WEIGHTS = ("*.safetensors", "*.bin", "*.pth", "*.gguf")


def identity_of(model: str, renderer: ChatRenderer, *, server: str | None = None) -> ModelIdentity:
    """The identity of a Hugging Face directory or hub id with this renderer.

    An engine in front of a server gives as `server` the name of the model that it serves. The
    weights in the directory are then not the ones that answer. Raises OSError if weights can't be
    read.
    """
    return ModelIdentity(
        weights=weights_digest(model_folder(model)) if server is None else "",
        template=sha256(renderer.template.source.encode()).hexdigest(),
        vocabulary=_vocabulary_digest(renderer),
        server=server or "",
    )


def weights_digest(folder: Path | None) -> str:
    """SHA-256 over names, sizes and bytes of the weights' files; empty where there are none.

    Of weights beyond MAX_READ_BYTES a part is read. A model that was trained further differs nearly
    everywhere, so its pieces do too.
    """
    if folder is None:
        return ""
    kinds = (sorted(folder.glob(pattern)) for pattern in _WEIGHTS)
    files = next((kind for kind in kinds if kind), [])
    if not files:
        return ""
    total = sum(file.stat().st_size for file in files)
    state = sha256()
    for file in files:
        size = file.stat().st_size
        state.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for start in _piece_starts(size, total):
                opened.seek(start)
                state.update(opened.read(_PIECE_BYTES))
    return state.hexdigest()


def _piece_starts(size: int, total: int) -> Iterator[int]:
    """Where the pieces of a file of `size` bytes begin: its first bytes and its last are in one."""
    num_pieces = math.ceil(size / _PIECE_BYTES)
    if total > MAX_READ_BYTES:
        num_pieces = max(num_pieces * MAX_READ_BYTES // total, 2)
    last = max(size - _PIECE_BYTES, 0)
    if num_pieces * _PIECE_BYTES >= size:
        yield from range(0, size, _PIECE_BYTES)
        return
    for number in range(num_pieces):
        yield last * number // (num_pieces - 1)


def _vocabulary_digest(renderer: ChatRenderer) -> str:
    """A digest of tokens and ids. Other versions write the tokenizer's own file in another way."""
    tokens = renderer.tokenizer.get_vocab(with_added_tokens=True)
    state = sha256()
    for token, number in sorted(tokens.items(), key=lambda item: (item[1], item[0])):
        state.update(f"{number} {token}\n".encode())
    return state.hexdigest()
