"""The sibling of a model, by a file that `python -m engine profile-variant --write` made.

The file has both models' fingerprints, which are those of their engines' stored blocks, and how far
answers are from exact. So the command is run with the engine's own settings. An engine of other
weights or settings refuses the file, and every engine refuses a pair that the gate refuses.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from pydantic import SecretStr, ValidationError

from engine.approximate.kinds import Sibling
from engine.backends.prepare.renderers import chat_renderer, chat_worker
from engine.compute.compress import check_compressible
from engine.compute.errors import ModelRefused
from engine.compute.loading import LoadedModel, load_model, model_facts
from engine.compute.variants import judge, least_layers, num_layers, profile_directories, table_of
from engine.protocol.reports import Technique
from engine.refusal import StartRefused
from engine.settings import PREFIX, Settings, problems_of
from engine.store.files import fingerprint
from engine.text.renderer import ChatRenderer


class Fingerprints(msgspec.Struct, frozen=True, kw_only=True):
    """A model, by digests in hex."""

    # Of its weights.
    weights: str
    # Of all that its stored blocks depend on.
    fingerprint: str


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The file."""

    own: Fingerprints
    sibling: Fingerprints
    techniques: list[Technique]


def store_facts(loaded: LoadedModel, renderer: ChatRenderer, block_size: int) -> dict[str, str]:
    """What a stored block depends on: the model as it computes, its template and tokenizer."""
    return model_facts(loaded, block_size) | {
        "template": renderer.template.source,
        "tokenizer": renderer.tokenizer.to_str(),
    }


def fingerprints_of(facts: Mapping[str, str]) -> Fingerprints:
    return Fingerprints(weights=facts["weights"], fingerprint=fingerprint(facts).hex())


def read_sibling(path: str, facts: Mapping[str, str]) -> tuple[Sibling, list[Technique]]:
    """The sibling that a profile's file names, and its techniques. Raises ModelRefused."""
    try:
        profile = msgspec.json.decode(Path(path).read_bytes(), type=Profile)
    except (OSError, msgspec.MsgspecError) as error:
        raise ModelRefused(f"{PREFIX}SIBLING: {path} is no profile of a sibling: {error}") from None
    fingerprints = fingerprints_of(facts)
    rows = judge(profile.techniques)
    if fingerprints.weights != profile.own.weights:
        raise ModelRefused(f"{PREFIX}SIBLING: {path} is a profile of other weights")
    if fingerprints != profile.own:
        raise ModelRefused(
            f"{PREFIX}SIBLING: {path} was made with other settings or versions: profile it anew"
        )
    least = least_layers(rows)
    if least is None:
        raise ModelRefused(f"{PREFIX}SIBLING: the gate refuses the pair\n{table_of(rows)}")
    model = bytes.fromhex(profile.sibling.fingerprint)
    return Sibling(model, least, num_layers(rows)), rows


def _fingerprints_in(directory: str) -> Fingerprints:
    """The fingerprints that an engine takes of the model in a directory."""
    # An engine's settings need a secret, although nobody calls this one.
    values: dict[str, Any] = {
        "secret": SecretStr("python -m engine profile-variant"),
        "backend": "native",
        "model": directory,
    }
    settings = Settings(**values)
    loaded = load_model(
        directory,
        dtype=settings.dtype,
        attention=settings.attention,
        kv_dtype=settings.kv_dtype,
    )
    check_compressible(loaded)
    renderer = chat_renderer(chat_worker(settings))
    return fingerprints_of(store_facts(loaded, renderer, settings.block_size))


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m engine profile-variant", description=__doc__)
    parser.add_argument("model", help="directory of the model that reads")
    parser.add_argument("sibling", help="directory of the model whose entries it would read")
    parser.add_argument("--write", metavar="FILE", help="for ENGINE_SIBLING")
    options = parser.parse_args(arguments)
    try:
        rows = profile_directories((options.model, options.sibling))
        print(table_of(rows))
        if options.write:
            profile = Profile(
                own=_fingerprints_in(options.model),
                sibling=_fingerprints_in(options.sibling),
                techniques=rows,
            )
            Path(options.write).write_bytes(msgspec.json.encode(profile))
    except ValidationError as error:
        print(*problems_of(error), sep="\n", file=sys.stderr)
        return 2
    except (StartRefused, OSError, ValueError) as error:
        print(f"profile-variant: {error}", file=sys.stderr)
        return 1
    return 0
