"""The parent's side of limits that all workers of a gateway share.

Each worker has a *seat* here as long as it lives: the places that its turns hold. When a worker
dies its places are free. What its turns reserved stays reserved until their records are closed:
the next process of that worker takes over those that its journal has, and gives back the others.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping

import msgspec

from gateway.base.errors import RateLimited, SpendLimitReached
from gateway.base.grants import Limits
from gateway.base.link import Handler
from gateway.limits.admission import Admission, Used
from gateway.limits.counting import Counting
from gateway.limits.shared import Begun, Call, Entered, Entering, Leaving, Refusal

# More than the turns that one worker can have between their charge and their record's close.
_MAX_COUNTED = 8192

_entering = msgspec.msgpack.Decoder(Entering).decode
_leaving = msgspec.msgpack.Decoder(Leaving).decode
_used = msgspec.msgpack.Decoder(Used).decode
_call = msgspec.msgpack.Decoder(Call).decode
_number = msgspec.msgpack.Decoder(int).decode


class Seat:
    """One worker's turns. `before` is the seat of the process that this worker follows."""

    def __init__(
        self,
        admission: Admission,
        counting: Counting,
        limits_of: Callable[[str], Limits],
        before: "Seat | None" = None,
    ) -> None:
        self._admission = admission
        self._counting = counting
        self._limits_of = limits_of
        self._held: dict[str, str] = {}
        self._calls: dict[int, str] = {}
        self._uncounted: set[str] = set(before._uncounted) if before else set()
        self._counted: OrderedDict[str, None] = before._counted if before else OrderedDict()

    @property
    def handlers(self) -> Mapping[str, Handler]:
        return {
            "enter": self.enter,
            "entered": self.entered,
            "leave": self.leave,
            "used": self.used,
            "count": self.count,
            "counted": self.counted,
        }

    def enter(self, body: bytes) -> Entered:
        entering = _entering(body)
        workspace, limits = entering.workspace, self._limits_of(entering.workspace)
        refusal = None
        try:
            self._admission.take(entering.turn_id, workspace, limits, entering.estimate)
        except (RateLimited, SpendLimitReached) as error:
            refusal = Refusal.of(error)
        else:
            self._hold(entering)
        return Entered(self._admission.standings(workspace, limits), refusal)

    def entered(self, body: bytes) -> None:
        """Count a turn that runs already.

        Its worker knew of no limit. There may be one here: a process hears of a change up to some
        seconds before another.
        """
        entering = _entering(body)
        limits = self._limits_of(entering.workspace)
        self._admission.take(
            entering.turn_id, entering.workspace, limits, entering.estimate, may_refuse=False
        )
        self._hold(entering)

    def _hold(self, entering: Entering) -> None:
        self._held[entering.turn_id] = entering.workspace
        self._uncounted.add(entering.turn_id)

    def leave(self, body: bytes) -> None:
        leaving = _leaving(body)
        if (workspace := self._held.pop(leaving.turn_id, None)) is None:
            return  # it was refused
        self._admission.leave(leaving.turn_id, workspace, is_open=leaving.is_open)
        if not leaving.is_open:
            self._uncounted.discard(leaving.turn_id)

    def used(self, body: bytes) -> None:
        """Count a closed turn, once.

        A process that is killed between the charge and the close leaves an open record, which the
        next process charges again.
        """
        used = _used(body)
        self._uncounted.discard(used.turn_id)
        if used.turn_id in self._counted:
            return
        self._counted[used.turn_id] = None
        if len(self._counted) > _MAX_COUNTED:
            self._counted.popitem(last=False)
        self._admission.count(used)

    def count(self, body: bytes) -> Begun:
        call = _call(body)
        try:
            self._counting.take(call.workspace, call.num_bytes)
        except RateLimited as error:
            return Begun(Refusal.of(error))
        self._calls[call.number] = call.workspace
        return Begun()

    def counted(self, body: bytes) -> None:
        if (workspace := self._calls.pop(_number(body), None)) is not None:
            self._counting.leave(workspace)

    def has_recovered(self, turn_ids: set[str]) -> None:
        """The worker's journal had these turns open. The other turns of its past used nothing."""
        for turn_id in self._uncounted - turn_ids - self._held.keys():
            self._admission.give_back(turn_id)
        self._uncounted &= turn_ids | self._held.keys()

    def lost(self) -> None:
        """The worker is gone: give its places back."""
        for turn_id, workspace in self._held.items():
            self._admission.leave(turn_id, workspace, is_open=True)
        self._held.clear()
        for workspace in self._calls.values():
            self._counting.leave(workspace)
        self._calls.clear()
