"""What a number of the admin API is."""

import msgspec


class Definition(msgspec.Struct, frozen=True, kw_only=True):
    """`formula` is what is computed, from fields of the ledger or of the engines."""

    title: str
    formula: str
    unit: str
