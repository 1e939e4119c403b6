"""What the gateway says about itself and about who asks."""

import msgspec


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    title: str
    formula: str
    unit: str


class About(msgspec.Struct, frozen=True, kw_only=True):
    """`workspace` is the only one that the key sees, None is all; `sample`: nothing is real.

    `may_send`: the key can call the model APIs.
    """

    workspace: str | None = None
    sample: bool = False
    may_send: bool = False
    has_placeholder_prices: bool = False
    workspaces: list[str] = []
    engines: list[str] = []
    models: list[str] = []
    served: list[str] = []
    definitions: dict[str, Definition] = {}
