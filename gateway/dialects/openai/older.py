"""The older form of calls: an assistant's `function_call`, and the message of role `function` that
answers it."""

from collections.abc import Sequence

from msgspec.structs import replace

from gateway.base.errors import InvalidRequest
from gateway.dialects.openai.request import (
    AssistantMessage,
    FunctionMessage,
    Message,
    ToolCall,
    ToolMessage,
)


def with_tools(messages: Sequence[Message]) -> list[Message]:
    """The messages with each `function_call` and its answer in the form of tools.

    Raise InvalidRequest for an answer without a call.
    """
    ids_by_name: dict[str, str] = {}
    newer: list[Message] = []
    for index, message in enumerate(messages):
        match message:
            case AssistantMessage(function_call=function) if function and not message.tool_calls:
                call = ToolCall(id=f"call_{index}", function=function)
                ids_by_name[function.name] = call.id
                newer.append(replace(message, tool_calls=[call], function_call=None))
            case FunctionMessage():
                call_id = ids_by_name.pop(message.name or "", None)
                if call_id is None:
                    raise InvalidRequest(
                        f"messages[{index}].name: messages with role 'function' must be a response"
                        " to a preceding message with 'function_call'"
                    )
                answer = ToolMessage(tool_call_id=call_id, content=message.content or "")
                newer.append(replace(answer, cache_control=message.cache_control))
            case _:
                newer.append(message)
    return newer
