"""Images of a prompt: whether they can be read, and where they stand in its tokens.

A prompt is rendered with one token for each image. Only the program that computes knows how many
tokens an image really has. It expands the tokens, and everything behind an image moves.
"""

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import replace
from hashlib import shake_256
from io import BytesIO
from typing import NamedTuple

import msgspec

from engine.backends.prepare.prepared import Prepared
from engine.cache.digests import TOKEN_BYTES
from engine.cache.ids import TokenId
from engine.errors import ImageRefused, InvalidRequest
from engine.protocol import MAX_IMAGE_PIXELS, MAX_IMAGES, MAX_PROMPT_PIXELS, Image, Prompt
from engine.protocol.reports import Description
from engine.text.files import read_json, read_prompt_files
from engine.text.rendered import RenderedPrompt

MAX_KNOWN = 10_000
"""How many decoded images a process remembers."""
_FORMATS = ("PNG", "JPEG", "GIF", "WEBP")
_NO_TOKEN = 1 << 31
"""No token's id is so large, so a word of an image is never taken for a token."""


def image_token_text(model: str) -> str:
    """The text of the token that stands for an image, by config.json; empty: it names none."""
    config = read_json(model, "config.json")
    token = config.get("image_token_id", config.get("image_token_index"))
    if not isinstance(token, int):
        return ""
    tokenizer = read_prompt_files(model).tokenizer
    text = tokenizer.id_to_token(token) or ""
    return text if tokenizer.encode(text, add_special_tokens=False).ids == [token] else ""


class ImageCheck:
    """Decodes each image once, since an agent sends its screenshots with every turn.

    It runs in a preparing process. The cost of a file is bounded by its pixels.
    """

    def __init__(self) -> None:
        self._is_whole: dict[str, bool] = {}

    def check(self, images: Sequence[Image]) -> None:
        """Raise ImageRefused for an image that is broken or has another size than it says.

        Raise InvalidRequest for more images than a prompt may have.
        """
        check_amount(images)
        if len(self._is_whole) > MAX_KNOWN:
            self._is_whole.clear()
        for image in images:
            if image.id not in self._is_whole:
                self._is_whole[image.id] = _is_whole(image)
            if not self._is_whole[image.id]:
                raise ImageRefused(image)


def check_amount(images: Sequence[Image]) -> None:
    """Raise InvalidRequest for more images, or more pixels, than a prompt may have."""
    if len(images) > MAX_IMAGES:
        raise InvalidRequest(f"prompt.images: at most {MAX_IMAGES}")
    if sum(image.width * image.height for image in images) > MAX_PROMPT_PIXELS:
        raise InvalidRequest(f"prompt.images: at most {MAX_PROMPT_PIXELS} pixels together")


def _is_whole(image: Image) -> bool:
    # Only engines whose model reads images need Pillow. It comes with vLLM.
    from PIL import Image as Pillow

    try:
        with Pillow.open(BytesIO(image.data), formats=_FORMATS) as opened:
            is_small = image.width * image.height <= MAX_IMAGE_PIXELS
            if opened.size != (image.width, image.height) or not is_small:
                return False
            opened.load()
    except (OSError, SyntaxError, ValueError, Pillow.DecompressionBombError):
        return False
    return True


def shown(prompt: Prompt, rendered: RenderedPrompt) -> list[Image]:
    """The images that have a place in the tokens, in order. Raise InvalidRequest for too many."""
    by_id = {image.id: image for image in prompt.images}
    images = [by_id[image_id] for image_id in rendered.images]
    check_amount(images)  # a text may repeat the reference of an image
    return images


class Expanded(NamedTuple):
    """A prompt's tokens with those of its images."""

    token_ids: list[TokenId]
    # For each image its first token and the number of its tokens.
    spans: list[tuple[int, int]]
    # For each image the place of its one token in the rendered prompt.
    places: list[int]


class Widening:
    """Where the rendered tokens lie once each image's one token has become many.

    A processor may join an image's outermost tokens with the text's tokens beside them, as Gemma
    3's does with line breaks. A joined token counts as the image's, and nothing ends inside of it.
    Raises InvalidRequest if the text's other tokens are not the rendered ones.
    """

    def __init__(self, compact: Sequence[TokenId], expanded: Expanded) -> None:
        token_ids, spans, places = expanded
        starts = [*(start for start, _ in spans), len(token_ids)]
        ends = [0, *(start + length for start, length in spans)]
        # For each text the number of its tokens that the image before it took, and the number that
        # the image behind it took.
        joined = list[tuple[int, int]]()
        for text in range(len(spans) + 1) if len(places) == len(spans) else ():
            begin = places[text - 1] + 1 if text else 0
            rendered = list(compact[begin : places[text] if text < len(places) else len(compact)])
            text_ids = token_ids[ends[text] : max(ends[text], starts[text])]
            num_joined = len(rendered) - len(text_ids)
            for front in range(2 if text else 1):
                is_within = 0 <= num_joined - front <= (text < len(places))
                if is_within and rendered[front : front + len(text_ids)] == text_ids:
                    joined.append((front, num_joined - front))
                    break
        if len(joined) <= len(spans):
            raise InvalidRequest("the prompt's images are not where the template put them")
        self._places = places
        self._begins = [place - behind for place, (_, behind) in zip(places, joined, strict=False)]
        self._ends = [
            place + 1 + front for place, (front, _) in zip(places, joined[1:], strict=True)
        ]
        self._starts = starts
        self._stops = ends[1:]

    def end(self, end: int) -> int:
        """The end of the first `end` rendered tokens, in expanded tokens."""
        image = bisect_left(self._begins, end) - 1
        if image < 0:
            return end
        if end >= self._ends[image]:
            return self._stops[image] + end - self._ends[image]
        return self._starts[image] if end <= self._places[image] else self._stops[image] - 1


def keys_of(expanded: Expanded, images: Iterable[Image]) -> bytes:
    """Packed token ids in which each of an image's tokens is mixed with a word of its digest.

    So equal keys mean equal images. Each position has another word.
    """
    keys = array("I", expanded.token_ids)
    for (start, length), image in zip(expanded.spans, images, strict=True):
        words = array("I", shake_256(bytes.fromhex(image.id)).digest(TOKEN_BYTES * length))
        for place, word in enumerate(words, start):
            keys[place] = (keys[place] ^ word) | _NO_TOKEN
    return keys.tobytes()


def widened(prepared: Prepared, expanded: Expanded, description: Description) -> Prepared:
    """The prepared request with the images' tokens."""
    widening = Widening(array("I", prepared.token_ids).tolist(), expanded)
    size = description.granularity
    segments = []
    for segment in prepared.segments:
        end = None if segment.end is None else widening.end(segment.end) // size * size
        segments.append(replace(segment, end=end))
    names = [msgspec.structs.replace(n, tokens=widening.end(n.tokens)) for n in prepared.names]
    return msgspec.structs.replace(
        prepared,
        token_ids=array("I", expanded.token_ids).tobytes(),
        keys=keys_of(expanded, prepared.images),
        segments=segments,
        names=names,
    )
