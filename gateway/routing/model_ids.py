"""Which model each id belongs to: the one that first served it, until an operator says otherwise.

Two engines whose models have one name have the same model under two conditions. First, no fact
differs that both of them report: the digests of weights, chat template and vocabulary, and the
model of the server behind an engine. Second, their full names agree or their weights are known to
be equal. A fact that only one of them reports is no difference. It is remembered, and compared with
engines that come later.

Pure but for the table, which `run` reads and writes: `admit` never waits. Before the table is read
for the first time, engines are admitted as they come. Then the table decides.
"""

import asyncio
from collections.abc import Callable, Mapping
from datetime import datetime
from typing import NamedTuple, Protocol

import msgspec

from engine.protocol.reports import AdapterInfo, Description, ModelIdentity
from gateway.base.background import pause
from gateway.base.catalogue import base_name
from gateway.base.errors import AnotherModel, GatewayError
from gateway.base.logs import get_logger
from gateway.base.record import MODEL_CHARACTERS
from gateway.structs.fleet import OwnedId

DEFAULT_ID = "*"
"""Stands for the ids that name no model: aliases without an `engine_model`, and `claude-*`."""
READ_SECONDS = 5.0
"""The longest time until a change at another gateway is seen here."""
_SAVE_SECONDS = 0.25
_NAME_CHARACTERS = 256
_SHOWN_DIGITS = 12
_FACTS: Mapping[str, str] = {
    "weights": "digest of weights",
    "template": "digest of the chat template",
    "vocabulary": "digest of the vocabulary",
    "server": "server's model",
}


class Table(Protocol):
    """Where ids are kept, as `ledger/model_ids.py` does it. Its calls raise GatewayError."""

    async def all(self) -> dict[str, OwnedId]: ...
    async def add(self, owned: list[OwnedId]) -> None: ...
    async def learn(self, before: OwnedId, after: OwnedId) -> None: ...
    async def replace(self, ids: list[str], owned: list[OwnedId]) -> None: ...


class Admitted(NamedTuple):
    """The part of an engine's description that is used."""

    # Without adapters whose ids belong to others.
    description: Description
    # Which adapters were left out, and why.
    notes: list[str]


class ModelIds:
    def __init__(
        self, table: Table | None, wall: Callable[[], datetime], *, has_default: bool = True
    ) -> None:
        """Without a table, ids are known only as long as this object lives. With `has_default` an
        id stands for the model that was served first."""
        self._table = table
        self._has_default = has_default
        self._wall = wall
        self._unsaved: dict[str, OwnedId] = {}
        self._learned: list[tuple[OwnedId, OwnedId]] = []
        self._changing = asyncio.Lock()
        self._log = get_logger("model_ids")
        self.known: dict[str, OwnedId] = {}

    @property
    def default(self) -> str | None:
        """The name of the model that ids without a model mean; None before the first engine."""
        entry = self.known.get(DEFAULT_ID)
        return None if entry is None else entry.engine_model

    @property
    def models(self) -> list[str]:
        """The names of all models that have an id."""
        return [id_ for id_, entry in self.known.items() if _is_model(entry)]

    def admit(self, description: Description) -> Admitted:
        """Give unowned ids to an engine's model and adapters. Raise AnotherModel where the model's
        name belongs to another model."""
        model_id = id_of(description.model)
        owner = self.known.get(model_id)
        if owner is None:
            self._give(model_id, description.model, description.identity)
        else:
            differences = differences_of(owner, description)
            if differences:
                raise AnotherModel(
                    f"it has another model than `{model_id}` here: {'; '.join(differences)}. Serve "
                    "it under another name, or give it the id: see Model ids in gateway/README.md"
                )
            self._learn(owner, description.identity)
        if self._has_default and DEFAULT_ID not in self.known:
            self._give(DEFAULT_ID, base_name(description.model), ModelIdentity())
        return self._with_own_adapters(description)

    def _with_own_adapters(self, description: Description) -> Admitted:
        notes = list[str]()
        adapters = list[AdapterInfo]()
        for info in description.adapters:
            adapter_id = adapter_id_of(description.model, info.name)
            owner = self.known.get(adapter_id)
            if info.is_leaving or (owner is not None and owner.identity.weights == info.digest):
                adapters.append(info)
            elif owner is None:
                self._give(adapter_id, description.model, ModelIdentity(weights=info.digest))
                adapters.append(info)
            else:
                notes.append(
                    f"its adapter `{info.name}` is not used: its weights are "
                    f"{info.digest[:_SHOWN_DIGITS]}, those of `{adapter_id}` here are "
                    f"{owner.identity.weights[:_SHOWN_DIGITS]}"
                )
        if not notes:
            return Admitted(description, notes)
        return Admitted(msgspec.structs.replace(description, adapters=adapters), notes)

    async def give_model(self, description: Description, *, is_default: bool = False) -> None:
        """Give this engine's model its id, and its adapters theirs, whoever had them. With
        `is_default` ids that name no model mean it too. Raise the errors of the table."""
        model_id = id_of(description.model)
        now = self._wall()
        old_ids = [id_ for id_ in self.known if id_ == model_id or id_.startswith(f"{model_id}:")]
        owned = [self._owned(model_id, description.model, description.identity, now)]
        for info in description.adapters:
            if not info.is_leaving:
                adapter_id = adapter_id_of(description.model, info.name)
                weights = ModelIdentity(weights=info.digest)
                owned.append(self._owned(adapter_id, description.model, weights, now))
        if is_default:
            owned.append(
                self._owned(DEFAULT_ID, base_name(description.model), ModelIdentity(), now)
            )
        await self._replace(old_ids, owned)

    async def give_adapter(self, model: str, info: AdapterInfo) -> None:
        """Give an adapter that an operator loaded its id, whoever had it. Raise the errors of the
        table."""
        adapter_id = adapter_id_of(model, info.name)
        weights = ModelIdentity(weights=info.digest)
        await self._replace([], [self._owned(adapter_id, model, weights, self._wall())])

    async def refresh(self) -> None:
        """Save what is new, then take in the table, which decides. Raise its errors."""
        if self._table is None:
            return
        async with self._changing:
            new_entries = dict(self._unsaved)
            await self._table.add(list(new_entries.values()))
            while self._learned:
                await self._table.learn(*self._learned[0])
                del self._learned[0]
            owners = await self._table.all()
            for id_, entry in new_entries.items():
                if self._unsaved.get(id_) is entry:
                    del self._unsaved[id_]
            self.known = owners | self._unsaved

    async def run(self, stopping: asyncio.Event) -> None:
        """Follow the table until the gateway stops."""
        seconds = 0.0
        last_error = ""
        while not stopping.is_set():
            if self._unsaved or self._learned or seconds >= READ_SECONDS:
                seconds = 0.0
                try:
                    await self.refresh()
                    last_error = ""
                except GatewayError as error:
                    if str(error) != last_error:
                        self._log.warning("model_ids_not_saved", error=str(error))
                    last_error = str(error)
                    await pause(stopping, READ_SECONDS)
            await pause(stopping, _SAVE_SECONDS)
            seconds += _SAVE_SECONDS

    def _give(self, id_: str, model: str, identity: ModelIdentity) -> None:
        entry = self._owned(id_, model, identity, self._wall())
        self.known[id_] = entry
        if self._table is not None:
            self._unsaved[id_] = entry
        self._log.info("model_id_given", id=id_, model=entry.engine_model)

    def _learn(self, owner: OwnedId, identity: ModelIdentity) -> None:
        """Remember facts of this model that no engine had reported before."""
        whole = united(owner.identity, identity)
        if whole == owner.identity:
            return
        entry = msgspec.structs.replace(owner, identity=whole)
        self.known[owner.id] = entry
        if owner.id in self._unsaved:
            self._unsaved[owner.id] = entry
        elif self._table is not None:
            self._learned.append((owner, entry))

    async def _replace(self, old_ids: list[str], owned: list[OwnedId]) -> None:
        async with self._changing:
            if self._table is not None:
                await self._table.replace(old_ids, owned)
            for id_ in [*old_ids, *(entry.id for entry in owned)]:
                self.known.pop(id_, None)
                self._unsaved.pop(id_, None)
            self.known |= {entry.id: entry for entry in owned}
        for entry in owned:
            self._log.info("model_id_changed", id=entry.id, model=entry.engine_model)

    def _owned(self, id_: str, model: str, identity: ModelIdentity, now: datetime) -> OwnedId:
        name = model.replace("\x00", "")[-_NAME_CHARACTERS:]
        return OwnedId(id=id_, engine_model=name, identity=identity, since=now)


def id_of(model: str) -> str:
    """The id that an engine's model answers to: the last part of its name."""
    return base_name(model).replace("\x00", "")[:MODEL_CHARACTERS]


def adapter_id_of(model: str, adapter: str) -> str:
    return f"{id_of(model)}:{adapter}"[-MODEL_CHARACTERS:]


def _is_model(entry: OwnedId) -> bool:
    return entry.id == id_of(entry.engine_model)


def differences_of(owner: OwnedId, description: Description) -> list[str]:
    """The facts by which an engine's model is not the owner of the id of its name's last part."""
    differences = list[str]()
    for fact, words in _FACTS.items():
        ours = getattr(owner.identity, fact)
        theirs = getattr(description.identity, fact)
        if ours and theirs and ours != theirs:
            cut = None if fact == "server" else _SHOWN_DIGITS
            differences.append(f"its {words} is {theirs[:cut]}, not {ours[:cut]}")
    if differences:
        return differences
    are_weights_known = bool(owner.identity.weights and description.identity.weights)
    if not are_weights_known and not _have_one_name(owner.engine_model, description.model):
        differences.append(
            f"its full name is {description.model[:128]}, not {owner.engine_model[:128]}"
        )
    return differences


def _have_one_name(name: str, other: str) -> bool:
    """Whether the names are equal, or one is the last part of the other."""
    return name == other or base_name(name) == other or base_name(other) == name


def united(known: ModelIdentity, identity: ModelIdentity) -> ModelIdentity:
    """The facts of both identities. A fact of `known` comes first."""
    return ModelIdentity(
        **{fact: getattr(known, fact) or getattr(identity, fact) for fact in _FACTS}
    )
