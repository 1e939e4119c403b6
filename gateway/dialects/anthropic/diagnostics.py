"""Cache diagnostics as responses carry them, in `message.diagnostics`."""

import msgspec


class ModelChanged(msgspec.Struct, frozen=True, tag="model_changed"):
    cache_missed_input_tokens: int


class ToolsChanged(msgspec.Struct, frozen=True, tag="tools_changed"):
    cache_missed_input_tokens: int


class SystemChanged(msgspec.Struct, frozen=True, tag="system_changed"):
    cache_missed_input_tokens: int


class MessagesChanged(msgspec.Struct, frozen=True, tag="messages_changed"):
    cache_missed_input_tokens: int


class PreviousMessageNotFound(msgspec.Struct, frozen=True, tag="previous_message_not_found"):
    pass


class Unavailable(msgspec.Struct, frozen=True, tag="unavailable"):
    pass


CacheMissReason = (
    ModelChanged
    | ToolsChanged
    | SystemChanged
    | MessagesChanged
    | PreviousMessageNotFound
    | Unavailable
)
_CHANGED: dict[str, type[ModelChanged | ToolsChanged | SystemChanged | MessagesChanged]] = {
    "model_changed": ModelChanged,
    "tools_changed": ToolsChanged,
    "system_changed": SystemChanged,
    "messages_changed": MessagesChanged,
}


class Diagnostics(msgspec.Struct, frozen=True):
    """`cache_miss_reason` None: the comparison had not ended when the response began."""

    cache_miss_reason: CacheMissReason | None


def changed(kind: str, missed_tokens: int | None) -> Diagnostics:
    """The report of a divergence of that kind."""
    if missed_tokens is None:
        return Diagnostics(Unavailable())
    return Diagnostics(_CHANGED[kind](missed_tokens))
