"""The model ids that clients may ask for, and the engines' models behind them."""

import tomllib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gateway.base.errors import ModelNotFound
from gateway.base.record import MODEL_CHARACTERS

SHIPPED = Path(__file__).parent / "models.toml"
_VENDOR_PREFIX = "claude-"


class CatalogueError(Exception):
    """The models file is wrong; the start stops."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`engine_model` None means any model that engines serve; `price` None means no price.

    `name` is what the ledger, the pages and metrics call it, whatever id a client used.
    """

    id: str
    display_name: str
    name: str = ""
    engine_model: str | None = None
    price: str | None = None
    min_cache_tokens: int | None = None

    def is_served_by(self, engine_model: str) -> bool:
        return is_served(self.engine_model, engine_model)


class Catalogue:
    def __init__(self, models: Iterable[Model], default: str, *, claude_alias: bool) -> None:
        self._models = {model.id: model for model in models}
        if default not in self._models:
            raise CatalogueError(f"models: default `{default}` is not among the models")
        self._default = self._models[default]
        self._claude_alias = claude_alias

    def find(self, requested: str, served: Sequence[str]) -> Model:
        """Resolve an id, given the models that engines serve.

        Raise ModelNotFound for an unknown id.
        """
        own = [one for one in served if requested in (one, base_name(one))]
        if model := self._models.get(requested):
            pass
        elif own:
            model = self._own(own[0], requested)
        elif self._claude_alias and requested.startswith(_VENDOR_PREFIX):
            model = replace(self._default, id=requested)
        else:
            raise ModelNotFound(requested, [model.id for model in self.models(served)])
        wanted = model.engine_model or next(iter(served), None)
        return replace(model, name=self.name_of(wanted, model.id) if wanted else model.id)

    def name_of(self, engine_model: str, asked: str = "") -> str:
        """The one name of an engine's model: the table's id for it, or the last part of its own.

        Where the table has several ids for it, each with a price of its own, it is the one `asked`.
        """
        ids = [
            each.id
            for each in self._models.values()
            if each.engine_model is not None and each.is_served_by(engine_model)
        ]
        return asked if asked in ids else [*ids, base_name(engine_model)[:MODEL_CHARACTERS]][0]

    def models(self, served: Iterable[str]) -> list[Model]:
        """The table's ids, then the ids of the engines' own models."""
        own = [self._own(name, base_name(name)) for name in served]
        return [*self._models.values(), *(m for m in own if m.id not in self._models)]

    def _own(self, engine_model: str, requested: str) -> Model:
        return Model(
            id=requested,
            display_name=base_name(engine_model),
            engine_model=engine_model,
            price=self._default.price,
        )


def is_served(wanted: str | None, engine_model: str) -> bool:
    """Whether an engine with this model serves a `Model.engine_model`."""
    return wanted is None or wanted in (engine_model, base_name(engine_model))


def base_name(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def load_catalogue(path: Path | None = None, *, claude_alias: bool = False) -> Catalogue:
    path = path or SHIPPED
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
        models = [Model(**{"display_name": e["id"], **e}) for e in document["models"]]
        return Catalogue(models, document["default"], claude_alias=claude_alias)
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise CatalogueError(f"models file `{path}`: {error!r}") from None
