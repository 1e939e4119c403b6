"""Why breakpoints were not read: what the gateway knows beyond the engine. Pure.

An engine knows its own entries. The gateway knows which engine and which model had a prefix, and
how the prompt differs from an earlier one. So it has better words for what an engine calls `cold`
or `grew`.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from msgspec import UnsetType

from engine.protocol import BreakpointReport, MissReason, Started
from gateway.prompt.fingerprint import Divergence
from gateway.prompt.plan import Plan, section_of
from gateway.structs.misses import GatewayMissReason
from gateway.structs.usage import TurnMark
from gateway.turn.diagnostics import LastHolders

_UNEXPLAINED = ("cold", "grew")
_UNABLE = ("below_minimum", "no_boundary")
"""Reasons of breakpoints that take no part in a look-up."""


class Missed(NamedTuple):
    """Why breakpoints were not read."""

    # The reason of the last breakpoint; None where it was read, or where the prompt merely grew.
    request: GatewayMissReason | None
    # The reason of each breakpoint by its segment; None where it was read. Breakpoints that the
    # engine did not report are not in it.
    marks: dict[int, GatewayMissReason | None]


@dataclass(frozen=True, kw_only=True)
class Misses:
    """Explains one answer."""

    holders: LastHolders
    # The engine that computed the prompt, for this model and in this epoch.
    engine: str
    model: str
    epoch: str
    # On the monotonic clock.
    arrived: float
    plan: Plan
    started: Started

    @cached_property
    def read_to(self) -> int:
        """The last segment that was surely read in full; -1 where none was."""
        read = self.started.usage.cache_read_tokens
        if not read:
            return -1
        names = zip(self.plan.names, self.started.receipt.name_tokens, strict=False)
        ends = (
            name.segment for name, tokens in names if name.characters is None and 0 < tokens <= read
        )
        marks = (report.segment for report in self.started.breakpoints if report.missed is None)
        return max(-1, max(ends, default=-1), max(marks, default=-1))

    @property
    def may_be_changed_head(self) -> bool:
        """Whether a mark was missed that a change of the tools or the system prompt explains."""
        prompt = self.plan.prompt
        num_head = len(prompt.tools) + len(prompt.system)
        is_unexplained = self.started.miss_reason == "cold" or any(
            report.missed in _UNEXPLAINED for report in self.started.breakpoints
        )
        return is_unexplained and self.read_to < num_head - 1

    def explain(self, change: Divergence | None) -> Missed:
        """`change` is where the prompt first differs from an earlier one."""
        marks = {
            report.segment: self._of_mark(report.segment, report.missed, change)
            for report in self.started.breakpoints
            if not isinstance(report.missed, UnsetType)
        }
        return Missed(self._of_request(marks, change), marks)

    def _of_request(
        self, marks: dict[int, GatewayMissReason | None], change: Divergence | None
    ) -> GatewayMissReason | None:
        reason = self.started.miss_reason
        if reason not in (None, "cold"):
            return reason
        able = [report for report in self.started.breakpoints if report.missed not in _UNABLE]
        if not able:
            return reason
        last = max(able, key=_segment)
        if reason == "cold":
            return self._of_mark(last.segment, reason, change)
        of_last = marks.get(last.segment)
        return None if of_last == "grew" else of_last

    def _of_mark(
        self, segment: int, missed: MissReason | None, change: Divergence | None
    ) -> GatewayMissReason | None:
        """The best reason why the prefix up to a segment was not read. `missed` is the engine's
        reason."""
        if missed not in _UNEXPLAINED:
            return missed
        if change is not None and change.kind == "model_changed" and self.read_to < 0:
            return change.kind
        digests = list(self._unread_prefixes(segment))
        reason = self.holders.explain(self.engine, self.model, self.epoch, digests, self.arrived)
        if reason is not None:
            return reason
        if change is None or change.segment is None or change.kind == "unavailable":
            return missed
        return change.kind if self.read_to < change.segment <= segment else missed

    def _unread_prefixes(self, segment: int) -> Iterator[str]:
        """Digests of the prefixes behind what was read and up to this segment, deepest first."""
        for name in reversed(self.plan.names):
            if name.characters is None and self.read_to < name.segment <= segment:
                yield name.digest


def marks_of(plan: Plan, started: Started, missed: Missed) -> list[TurnMark] | None:
    """The breakpoints as the ledger keeps them; None where the engine did not report one of
    them."""
    if len(missed.marks) < len(started.breakpoints):
        return None
    prompt = plan.prompt
    ttls = {point.segment: point.ttl for point in plan.breakpoints}
    marks = []
    for report in started.breakpoints:
        section, block = section_of(report.segment, len(prompt.tools), len(prompt.system))
        ttl = report.ttl or ttls[report.segment]
        reason = missed.marks[report.segment]
        mark = TurnMark(section=section, block=block, tokens=report.tokens, ttl=ttl, missed=reason)
        marks.append(mark)
    return marks


def _segment(report: BreakpointReport) -> int:
    return report.segment
