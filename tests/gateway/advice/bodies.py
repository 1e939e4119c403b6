"""What made-up requests are written with: bodies of all dialects, as clients write them.

Each shape is a list of bodies in the order of their sending. They go through the decoders of their
dialects, as pasted requests do.
"""

import struct
from base64 import b64encode
from typing import Any

from tests.gateway.advice.shapes import Author

NUM = 12
Body = dict[str, Any]
Bodies = list[Body]
MARK = {"type": "ephemeral"}


def block(text: str) -> Body:
    return {"type": "text", "text": text}


def messages_body(*messages: Body, **fields: Any) -> Body:
    return {"model": "m", "max_tokens": 9, "messages": list(messages), **fields}


def chat_body(*messages: Body, **fields: Any) -> Body:
    return {"model": "m", "messages": list(messages), **fields}


def says(role: str, content: Any) -> Body:
    return {"role": role, "content": content}


def gemini_body(*contents: Body, **fields: Any) -> Body:
    return {"contents": list(contents), **fields}


def content(role: str, *parts: Any) -> Body:
    return {"role": role, "parts": [{"text": p} if isinstance(p, str) else p for p in parts]}


def tools_of(author: Author) -> list[Body]:
    return [
        {"name": tool.name, "description": tool.description, "input_schema": tool.input_schema}
        for tool in author.tools()
    ]


def functions_of(author: Author) -> list[Body]:
    return [
        {
            "type": "function",
            "function": {
                "name": tool.name,
                "description": tool.description,
                "parameters": tool.input_schema,
            },
        }
        for tool in author.tools()
    ]


def image(width: int, height: int, content: bytes = b"") -> Body:
    size = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + b"IHDR" + size + bytes(4) + content
    source = {"type": "base64", "media_type": "image/png", "data": b64encode(data).decode()}
    return {"type": "image", "source": source}
