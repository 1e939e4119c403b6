"""Tools that are no functions (web search, custom tools and the like), and media in content parts.

No server here runs such tools, and no model here was trained on them: each is left out of the
prompt and told. Its place in `tools` stays taken, so that paths are the client's.
"""

import msgspec
from msgspec import Raw

from gateway.dialects.foreign import decode_tools, kinds_of_tools
from gateway.dialects.openai.content import (
    Address,
    AudioPart,
    AudioUrlPart,
    CacheControl,
    FilePart,
    ForeignTool,
    Function,
    ImagePart,
    MediaPart,
    Tool,
    VideoPart,
)
from gateway.prompt.media import Kind, Media


class _Declared(msgspec.Struct):
    type: str
    cache_control: CacheControl | None = None


_declared = msgspec.json.Decoder(_Declared)
_tool = msgspec.json.Decoder(Tool)


def decode_foreign_tools(raw: bytes) -> list[Tool] | None:
    """The tools of a request, of which some are no functions; None where all are.

    Raise msgspec.ValidationError with the path in the whole body.
    """
    tools = kinds_of_tools(raw, "function")
    return None if tools is None else decode_tools(tools, _tool.decode, _foreign)


def _foreign(tool: Raw) -> Tool:
    declared = _declared.decode(tool)
    return ForeignTool("function", Function(name=declared.type), declared.cache_control)


def media_of(part: MediaPart) -> Media:
    """What a placeholder tells of a part."""
    match part:
        case ImagePart(image_url=address):
            return _of_address("image", address)
        case VideoPart(video_url=address):
            return _of_address("video", address)
        case AudioUrlPart(audio_url=address):
            return _of_address("audio", address)
        case AudioPart(input_audio=sound):
            return Media("audio", sound.format)
        case FilePart(file=file):
            if file.file_data is not None:
                found = _of_address("file", file.file_data)
                return Media("file", found.media_type, name=file.filename or "")
            return Media("file", name=file.filename or file.file_id or "")


def _of_address(kind: Kind, address: Address | str) -> Media:
    """A `data:` URL (RFC 2397) has the media type in front."""
    url = address if isinstance(address, str) else address.url
    if not url.startswith("data:"):
        return Media(kind, name=url)
    head, _, data = url.removeprefix("data:").partition(",")
    return Media(kind, head[:256].partition(";")[0], data)
