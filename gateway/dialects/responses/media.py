"""Images and files in the input: the text of a text file, a placeholder for all else."""

from base64 import b64decode
from binascii import Error as Base64Error

from gateway.dialects.responses.content import InputFile, InputImage
from gateway.prompt.ignored import Notepad
from gateway.prompt.media import Kind, Media, Unreadable, stand_in

_TEXT_TYPES = ("text/", "application/json", "application/xml", "application/yaml")


def text_of(
    path: str, part: InputImage | InputFile, unreadable: Unreadable, notepad: Notepad
) -> str:
    """Raise InvalidRequest where the setting refuses what no model here reads."""
    if isinstance(part, InputImage):
        media_type, data = _split(part.image_url or "")
        name = "" if data else part.image_url or part.file_id or ""
        return stand_in(path, Media("image", media_type, data, name), unreadable, notepad)
    media_type, data = _split(part.file_data or "")
    name = part.filename or part.file_url or part.file_id or ""
    text = _decoded(data) if media_type.startswith(_TEXT_TYPES) else None
    if text is not None:
        return f"{name}\n{text}" if name else text
    kind: Kind = "document" if part.file_data else "file"
    return stand_in(path, Media(kind, media_type, data, name), unreadable, notepad)


def _split(url: str) -> tuple[str, str]:
    """Media type and base64 of a data URL, both empty for any other."""
    head, comma, data = url.partition(",")
    if not (comma and head.startswith("data:") and head.endswith(";base64")):
        return "", ""
    return head.removeprefix("data:").removesuffix(";base64"), data


def _decoded(data: str) -> str | None:
    try:
        return b64decode(data, validate=True).decode()
    except (Base64Error, ValueError):
        return None
