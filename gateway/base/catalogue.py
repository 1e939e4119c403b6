"""The model ids that clients may ask for, and the engines' models behind them."""

import tomllib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from engine.protocol.reports import AdapterInfo, Description
from gateway.base.errors import ModelNotFound
from gateway.base.record import MODEL_CHARACTERS

SHIPPED = Path(__file__).parent / "models.toml"
_VENDOR_PREFIX = "claude-"


class CatalogueError(Exception):
    """The models file is wrong; the start stops."""


class CatalogueModel(msgspec.Struct, frozen=True, kw_only=True):
    """What an id that clients may ask for means."""

    id: str
    display_name: str
    # Its name in the ledger, the pages and metrics, whatever id a client used.
    name: str = ""
    # None: the installation's default model, while no engine has been ready yet.
    engine_model: str | None = None
    # The id of its price; None means no price.
    price: str | None = None
    min_cache_tokens: int | None = None
    # The name of the adapter that answers on that model, and which weights that is now.
    adapter: str | None = None
    weights: AdapterInfo | None = None
    # The model that an alias means; empty for a model's own id.
    stands_for: str = ""
    # Whether its engines take images.
    sees: bool = False

    @property
    def digest(self) -> str:
        """The digest of the adapter's weights, empty without one."""
        return "" if self.weights is None else self.weights.digest

    def is_served_at(self, engine: Description) -> bool:
        """Whether an engine has the model, and the adapter."""
        if self.weights is not None:
            loaded = (adapter.digest for adapter in engine.adapters if not adapter.is_leaving)
            if self.digest not in loaded:
                return False
        return self.is_served_by(engine.model)

    def is_served_by(self, engine_model: str) -> bool:
        return is_served(self.engine_model, engine_model)


class Served(NamedTuple):
    """What engines serve."""

    # The names of their models.
    models: Sequence[str]
    # Each adapter with the name of its model.
    adapters: Sequence[tuple[str, AdapterInfo]] = ()
    # The models that some engine sees images with.
    seeing: Collection[str] = ()
    # The model of ids that name none; None before there is one.
    default: str | None = None
    # Models that were served before. An engine that has them may come.
    known: Sequence[str] = ()


class Catalogue:
    def __init__(
        self,
        models: Iterable[CatalogueModel],
        default: str | None,
        *,
        claude_alias: bool | str,
        price: str | None = None,
    ) -> None:
        """Make a catalogue of the table's models.

        `claude_alias` is the id that `claude-*` means. With True that is `default`, or without a
        default the first model that was served. `price` is the price of models without an id in the
        table, unless the default has one.
        """
        self._models = {model.id: model for model in models}
        if default is not None and default not in self._models:
            raise CatalogueError(f"models: default `{default}` is not among the models")
        self._default = CatalogueModel(id="", display_name="", price=price)
        if default is not None:
            self._default = self._models[default]
        self._claude_alias = claude_alias

    @property
    def has_default(self) -> bool:
        """Whether some id means the model that was served first."""
        is_default = self._claude_alias is True and self._default.engine_model is None
        return is_default or any(model.engine_model is None for model in self._models.values())

    def price_of(self, requested: str, served: Served) -> str | None:
        """The id of the price of a model; None for an unknown one, and for one without a price."""
        try:
            return self.find(requested, served).price
        except ModelNotFound:
            return None

    def find(self, requested: str, served: Served) -> CatalogueModel:
        """Resolve an id, given what engines serve. `MODEL:ADAPTER` is an adapter on a model. Raise
        ModelNotFound for an unknown id, and for an adapter that no engine of the model has."""
        model = self._find(requested, served)
        base, _, adapter = requested.rpartition(":")
        if model is None:
            base_model = self._find(base, served)
            if base_model is not None and base_model.adapter is None:
                model = _with_adapter(base_model, requested, adapter)
        if model is None:
            raise self._not_found(requested, served)
        if model.adapter is not None:
            # While an adapter is replaced, engines may have several weights under its name. Then
            # the weights that most engines have count.
            most_loaded = Counter(
                (name, info)
                for name, info in served.adapters
                if info.name == model.adapter and model.is_served_by(name)
            ).most_common(1)
            if not most_loaded:
                raise self._not_found(requested, served)
            (model_name, weights), _ = most_loaded[0]
            # The one name of an adapter: the table's id for it, or that of its model with it.
            adapters = [entry for entry in self._models.values() if entry.adapter == weights.name]
            ids = [entry.id for entry in adapters if entry.is_served_by(model_name)]
            name = [*ids, f"{self.name_of(model_name)}:{weights.name}"[-MODEL_CHARACTERS:]][0]
            model = replace(model, engine_model=model_name, weights=weights)
        else:
            model_name = model.engine_model or ""
            name = self.name_of(model_name, model.id) if model_name else model.id
        sees = any(model.is_served_by(engine_model) for engine_model in served.seeing)
        return replace(model, name=name, sees=sees)

    def _find(self, requested: str, served: Served) -> CatalogueModel | None:
        model = self._named(requested, served)
        if model is not None:
            return model
        # The alias is for any model of the vendor's, whose ids have no adapter.
        if not requested.startswith(_VENDOR_PREFIX) or ":" in requested:
            return None
        if self._claude_alias is True:
            target: CatalogueModel | None = _resolved(self._default, served)
        else:
            target = self._named(self._claude_alias, served) if self._claude_alias else None
        if target is None:
            return None
        alias = replace(target, id=requested, display_name=requested)
        return alias if target.adapter is not None else _with_meaning(alias)

    def _named(self, requested: str, served: Served) -> CatalogueModel | None:
        """The model of an id in the table or of a served model; None for another id."""
        if requested in self._models:
            return _resolved(self._models[requested], served)
        for name in (*served.models, *served.known):
            if requested in (name, base_name(name)):
                return self._own(name, requested)
        return None

    def _not_found(self, requested: str, served: Served) -> ModelNotFound:
        return ModelNotFound(requested, [model.id for model in self.models(served)])

    def name_of(self, engine_model: str, requested: str = "") -> str:
        """The one name of an engine's model: the table's id for it, or the last part of its own.
        Where the table has several ids for it, each with a price of its own, the name is
        `requested` if that is among them."""
        ids = [
            model.id
            for model in self._models.values()
            if model.engine_model is not None
            and model.adapter is None
            and model.is_served_by(engine_model)
        ]
        return (
            requested if requested in ids else [*ids, base_name(engine_model)[:MODEL_CHARACTERS]][0]
        )

    def models(self, served: Served) -> list[CatalogueModel]:
        """The table's ids, then the ids of the engines' own models, then those of adapters."""
        resolved = {id_: _resolved(model, served) for id_, model in self._models.items()}
        for name in served.models:
            resolved.setdefault(base_name(name), self._own(name, base_name(name)))
        bases = [model for model in resolved.values() if model.adapter is None]
        for name, info in served.adapters:
            base = next((base_model for base_model in bases if base_model.is_served_by(name)), None)
            if base is None:  # the table's id of that name means another model
                continue
            model = _with_adapter(base, f"{base.id}:{info.name}", info.name)
            resolved.setdefault(model.id, replace(model, engine_model=name))
        return list(resolved.values())

    def ids_at(self, engine: Description, served: Served) -> list[str]:
        """The ids of `models` that an engine answers."""
        ids = list[str]()
        for listed in self.models(served):
            with suppress(ModelNotFound):  # an adapter of the table that no engine has
                if self.find(listed.id, served).is_served_at(engine):
                    ids.append(listed.id)
        return ids

    def sees(self, model_id: str, served: Served) -> bool:
        """Whether the model of that id is shown images. A model that no engine has is not."""
        with suppress(ModelNotFound):
            return self.find(model_id, served).sees
        return False

    def base_of(self, model: CatalogueModel) -> str:
        """The id of the model that an adapter is on or an alias stands for, and of a model
        itself."""
        if model.stands_for:
            return model.stands_for
        is_plain = model.adapter is None or model.engine_model is None
        return model.id if is_plain or not model.engine_model else self.name_of(model.engine_model)

    def _own(self, engine_model: str, requested: str) -> CatalogueModel:
        return CatalogueModel(
            id=requested,
            display_name=base_name(engine_model),
            # All engines under this name have one model, however much of its path they say.
            engine_model=base_name(engine_model),
            price=self._default.price,
        )


def _resolved(model: CatalogueModel, served: Served) -> CatalogueModel:
    """A model of the table with the model that it means."""
    if model.engine_model is None:
        model = replace(model, engine_model=served.default)
    return model if model.adapter is not None else _with_meaning(model)


def _with_meaning(model: CatalogueModel) -> CatalogueModel:
    """A model of the table with the model that it stands for, if its id is not its engines' own."""
    if model.engine_model is None:
        return model
    full_name = base_name(model.engine_model)
    return replace(
        model, stands_for="" if model.id in (full_name, model.engine_model) else full_name
    )


def _with_adapter(model: CatalogueModel, requested: str, adapter: str) -> CatalogueModel:
    return replace(model, id=requested, display_name=requested, adapter=adapter, stands_for="")


def is_served(model: str | None, engine_model: str) -> bool:
    """Whether an engine with this model serves a `CatalogueModel.engine_model`."""
    return model is None or model == engine_model or model == base_name(engine_model)


def base_name(model: str) -> str:
    return model.rstrip("/").rsplit("/", 1)[-1]


def load_catalogue(path: Path | None = None, *, claude_alias: bool | str = False) -> Catalogue:
    path = path or SHIPPED
    try:
        with path.open("rb") as file:
            document = tomllib.load(file)
        entries = document.get("models", [])
        models = [CatalogueModel(**{"display_name": entry["id"], **entry}) for entry in entries]
        default = document.get("default")
        price = document.get("price")
        return Catalogue(models, default, claude_alias=claude_alias, price=price)
    except (OSError, tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise CatalogueError(f"models file `{path}`: {error!r}") from None
