"""How much KV memory a model needs and how many leases fit.

    python -m scripts.docs.sizing CONFIG_OR_DIR

Reads a Hugging Face config.json (or the directory that has one) and nothing else: no weights, no
torch. The figures are the pool's own: keys and values of every token in every layer.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.settings import Settings
from engine.sizing import GIB, KV_DTYPES, KvSize, NotSizable, kv_size
from scripts.setup.options import new_parser

BLOCK_SIZE: int = Settings.model_fields["block_size"].default
LEASE_SHARE: float = Settings.model_fields["lease_share"].default


def main() -> int:
    options = parse_arguments()
    try:
        config = read_config(options.config)
        dtype = options.dtype or dtype_of(config)
        size = kv_size(config, dtype)
    except (OSError, json.JSONDecodeError, NotSizable) as error:
        print(f"{options.config}: {error}", file=sys.stderr)
        return 1
    print_size(size, dtype)
    print_leases(size, options)
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = new_parser(
        __doc__,
        dtype=(str, "of the KV memory; default: the model's own", sorted(KV_DTYPES)),
        memory=(8.0, "GiB of the pool"),
        lease_tokens=8192,
        lease_share=LEASE_SHARE,
        block_size=BLOCK_SIZE,
    )
    parser.add_argument("config", type=Path, metavar="CONFIG_OR_DIR")
    options = parser.parse_args()
    return options


def read_config(path: Path) -> dict[str, Any]:
    config = json.loads((path / "config.json" if path.is_dir() else path).read_text("utf-8"))
    if not isinstance(config, dict):
        raise NotSizable("the configuration is not an object")
    return config


def dtype_of(config: dict[str, Any]) -> str:
    """The weights' type, under its new name or its old one."""
    inner = config.get("text_config") or {}
    for place in (config, inner):
        for field in ("dtype", "torch_dtype"):
            if isinstance(place.get(field), str):
                return str(place[field])
    raise NotSizable("dtype: not given in the configuration, so --dtype is needed")


def print_size(size: KvSize, dtype: str) -> None:
    if size.is_nested:
        print("multimodal: sized by its text decoder (`text_config`)")
    rows = {
        "layers": size.num_layers,
        f"KV heads, for {size.num_heads} heads": size.num_kv_heads,
        "head dimension": size.head_dim,
        f"bytes of a head's keys in {dtype}": size.head_bytes,
        "KV bytes per token": size.bytes_per_token,
        "tokens per GiB": size.tokens_per_gib,
    }
    if size.window is not None:
        where = f"{size.num_windowed} of {size.num_layers} layers; the engine keeps all tokens"
        rows[f"sliding window, in {where}"] = size.window
    for name, number in rows.items():
        print(f"{number:>16,}  {name}")


def print_leases(size: KvSize, options: argparse.Namespace) -> None:
    memory_bytes = int(options.memory * GIB)
    tokens = options.lease_tokens
    blocks = size.num_blocks(memory_bytes, options.block_size)
    leases = size.num_leases(
        tokens,
        memory_bytes=memory_bytes,
        block_size=options.block_size,
        lease_share=options.lease_share,
    )
    lease_bytes = tokens * size.bytes_per_token
    print(f"\none lease of {tokens:,} tokens: {lease_bytes:,} bytes ({lease_bytes / 1e9:.2f} GB)")
    print(
        f"in {options.memory:g} GiB: {blocks:,} blocks of {options.block_size} tokens; leases may"
        f" hold {options.lease_share:.0%}: {leases:,} of them fit"
    )


if __name__ == "__main__":
    sys.exit(main())
