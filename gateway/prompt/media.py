"""Images, sounds and files in a prompt of a model that can't read them: a placeholder or a refusal.

Leaving such content out would change what the answer means. So the request is refused, or a text
that says what is missing replaces the content, and the answer reports it. Nothing is decoded: an
image's size is read from the first bytes of its file.
"""

import re
import struct
from base64 import b64decode
from binascii import Error as Base64Error
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from engine.protocol import Prompt, TextPart, ToolResultPart
from gateway.base.errors import InvalidRequest
from gateway.prompt.ignored import Notepad

Unreadable = Literal["placeholder", "refuse"]
Kind = Literal["image", "document", "audio", "video", "file"]

_REFUSALS: dict[Kind, str] = {
    "image": "this model reads no images. Could not process image",
    "document": "this server reads text documents only. Could not process document",
    "audio": "this model reads no audio. Could not process audio",
    "video": "this model reads no video. Could not process video",
    "file": "this server keeps no files. Could not process file",
}
"""Coding agents look for the last sentence. When they see it, they go on without the image."""
_HEAD_CHARACTERS = 48 * 1024
"""How much base64 of a file is decoded. A JPEG's size stands behind its metadata."""
_MAX_NAME = 64
_MAX_SEGMENTS = 1000
"""The most segments and bytes of padding before a JPEG's size. A colour profile takes 255."""


@dataclass(frozen=True, slots=True)
class Media:
    """One piece of content that is not text."""

    kind: Kind
    # The media type as the client wrote it.
    media_type: str = ""
    # The file in base64.
    data: str = ""
    # The file's name or address.
    name: str = ""
    # How much detail of an image the client wants.
    detail: str | None = None


def stand_in(path: str, media: Media, unreadable: Unreadable, notepad: Notepad) -> str:
    """The text that replaces the content. Raise InvalidRequest where the setting refuses it."""
    if unreadable == "refuse":
        raise InvalidRequest(f"{path}: {_REFUSALS[media.kind]}")
    notepad.ignore(path, f"not shown to this model: {media.kind}")
    return placeholder(media)


def placeholder(media: Media) -> str:
    """For example `[image: PNG, 640 × 480, not shown to this model]`.

    It depends on the content alone, so equal prompts stay equal.
    """
    subtype = media.media_type.partition(";")[0].rpartition("/")[2].upper()
    form = subtype.removeprefix("X-").removesuffix("+XML")
    size = None
    head = media.data[:_HEAD_CHARACTERS] if media.kind == "image" else ""
    with suppress(Base64Error, ValueError):
        size = image_size(b64decode(head[: len(head) // 4 * 4]))
    dimensions = "" if size is None else f"{size[0]} × {size[1]}"
    facts = [_printable(form), dimensions, _printable(media.name), "not shown to this model"]
    return f"[{media.kind}: {', '.join(fact for fact in facts if fact)}]"


_PLACEHOLDER = re.compile(r"\[image: (?:[^\[\]]*, )?not shown to this model\]")


def num_placeholders(prompt: Prompt) -> int:
    """How many images the placeholders of a prompt stand for."""
    texts = [block.text for block in prompt.system]
    for message in prompt.messages:
        for part in message.parts:
            if isinstance(part, TextPart | ToolResultPart):
                texts.append(part.text)
    return sum(len(_PLACEHOLDER.findall(text)) for text in texts)


def _printable(text: str) -> str:
    """At most 64 printable characters. A bracket would end the placeholder."""
    head = text[: 2 * _MAX_NAME].replace("[", "(").replace("]", ")")
    return "".join(letter for letter in head if letter.isprintable())[:_MAX_NAME]


def image_size(head: bytes) -> tuple[int, int] | None:
    """Width and height, in pixels, from the beginning of a PNG, GIF, WebP or JPEG file.

    None where it is none of these, or the size comes later. Sources: PNG 11.2.2 (IHDR), GIF89a 18,
    RFC 9649 2.3 to 2.7 (VP8X, VP8L, VP8), ITU-T T.81 B.2.2 (SOF).

    The library `imagesize` (2.0.1) has no bound: a JPEG of 10 MB of empty segments, which a client
    may send, takes it seconds. It also takes the scale in a VP8 header for a part of the width.
    """
    try:
        if head.startswith(b"\x89PNG\r\n\x1a\n") and head[12:16] == b"IHDR":
            return _pair(">II", head, 16)
        if head.startswith((b"GIF87a", b"GIF89a")):
            return _pair("<HH", head, 6)
        if head.startswith(b"RIFF") and head[8:12] == b"WEBP":
            match head[12:16]:
                case b"VP8X" if len(head) >= 30:
                    width, height = (int.from_bytes(head[at : at + 3], "little") for at in (24, 27))
                    return width + 1, height + 1
                case b"VP8L" if len(head) >= 25:
                    bits = int.from_bytes(head[21:25], "little")
                    return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
                case b"VP8 ":
                    width, height = _pair("<HH", head, 26)
                    return width & 0x3FFF, height & 0x3FFF
        at = 2 if head.startswith(b"\xff\xd8") else len(head)
        for _ in range(_MAX_SEGMENTS):
            if at + 4 > len(head) or head[at] != 0xFF:
                break
            marker = head[at + 1]
            # SOF0 to SOF15 without DHT (C4), JPG (C8) and DAC (CC).
            if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
                height, width = _pair(">HH", head, at + 5)
                return width, height
            if marker == 0xFF:  # a fill byte
                at += 1
            else:
                at += 2 + max(2, int.from_bytes(head[at + 2 : at + 4], "big"))
    except struct.error:
        pass
    return None


def _pair(form: str, head: bytes, at: int) -> tuple[int, int]:
    width, height = struct.unpack_from(form, head, at)
    return width, height
