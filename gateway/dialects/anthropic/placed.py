"""The texts of blocks that are no text: documents, search results, images, the vendor's blocks."""

from base64 import b64decode
from binascii import Error as Base64Error

from gateway.base.errors import InvalidRequest
from gateway.dialects.anthropic.content import (
    Base64Source,
    Block,
    ContentSource,
    Document,
    FileSource,
    Image,
    SearchResult,
    Text,
    TextSource,
    UrlSource,
)
from gateway.prompt.ignored import Notepad
from gateway.prompt.media import Kind, Media, Unreadable, stand_in

_NO_CITATIONS = "this model cites nothing"


def search_text(path: str, block: SearchResult, notepad: Notepad) -> str:
    if block.citations and block.citations.enabled:
        notepad.ignore(f"{path}.search_result.citations", _NO_CITATIONS)
    lines = [block.title, block.source, *(text.text for text in block.content)]
    return "\n".join(line for line in lines if line)


def image_text(path: str, block: Image, unreadable: Unreadable, notepad: Notepad) -> str:
    return stand_in(path, _media("image", block.source), unreadable, notepad)


def document_text(path: str, block: Document, unreadable: Unreadable, notepad: Notepad) -> str:
    """Title, context and text. A PDF, an address or a file's id has a placeholder for its text."""
    if block.citations and block.citations.enabled:
        notepad.ignore(f"{path}.document.citations", _NO_CITATIONS)
    body = _body(f"{path}.document.source", block.source, unreadable, notepad)
    text = "\n".join(line for line in (block.title, block.context, body) if line)
    if not text.strip():
        raise InvalidRequest(f"{path}.document.source: the document is empty")
    return text


def _body(
    path: str,
    source: TextSource | ContentSource | Base64Source | UrlSource | FileSource,
    unreadable: Unreadable,
    notepad: Notepad,
) -> str:
    match source:
        case TextSource():
            return source.data
        case ContentSource(content=str(text)):
            return text
        case ContentSource(content=list(blocks)):
            return "\n".join(
                block.text
                if isinstance(block, Text)
                else image_text(f"{path}.content.{index}", block, unreadable, notepad)
                for index, block in enumerate(blocks)
            )
        case Base64Source(media_type=kind) if kind.startswith("text/"):
            return _decoded(path, source)
        case Base64Source() | UrlSource() | FileSource():
            return stand_in(path, _media("document", source), unreadable, notepad)
    raise AssertionError(source)


def _decoded(path: str, source: Base64Source) -> str:
    try:
        return b64decode(source.data, validate=True).decode()
    except (Base64Error, ValueError):
        raise InvalidRequest(f"{path}.data: Input should be base64 of UTF-8") from None


def _media(kind: Kind, source: Base64Source | UrlSource | FileSource) -> Media:
    match source:
        case Base64Source():
            return Media(kind, source.media_type, source.data)
        case UrlSource():
            return Media(kind, name=source.url)
        case FileSource():
            return Media(kind, name=source.file_id)


def foreign_text(path: str, block: Block, unreadable: Unreadable, notepad: Notepad) -> str:
    """A block that only the vendor's servers write and read."""
    kind = block.__struct_config__.tag
    if unreadable == "refuse":
        raise InvalidRequest(
            f"{path}: content blocks of type '{kind}' are not supported by this server"
        )
    notepad.ignore(path, f"not shown to this model: {kind}")
    return f"[{kind}: not shown to this model]"
