"""Blocks with a beginning and an end: with, try, match."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from accumlint.source.reading.nodes import walk
from accumlint.source.rehearsal.branches import ways_out
from accumlint.source.rehearsal.conditions import advances, multiplies_by_zero
from accumlint.source.rehearsal.holding import used
from accumlint.source.rehearsal.state import Leave, Signal, State
from accumlint.source.rehearsal.unclear import ask_for_sync, counting, enters, hang_on, hang_on_exception
from accumlint.source.rehearsal.values import (
    Known,
    Opaque,
    Phi,
    Stream,
    Value,
    key_of,
)
from accumlint.trace import Event, Guard, Kind


class Blocks(State):
    """Runs with, try and match statements."""

    __slots__ = ()

    def _exec_With(self, node: ast.With | ast.AsyncWith) -> Signal | None:
        return self._with_items(node, list(node.items))

    _exec_AsyncWith = _exec_With

    def _with_items(self, node: ast.With | ast.AsyncWith, items: list[ast.withitem]) -> Signal | None:
        if not items:
            return self.block(node.body)
        first, rest = items[0], items[1:]
        chosen = self.eval(first.context_expr)
        if isinstance(chosen, Phi):
            ask_for_sync(self, chosen)
        value = self.force(chosen)
        enters(self, value)
        used(self, value, first.context_expr)
        if isinstance(value, Stream) and value.kind == "generator":
            return self._with_generator(node, first, rest, value)
        with counting(self, value, first, node.body):
            signal = self.within(value, first, lambda: self._with_items(node, rest))
        used(self, value, first.context_expr)
        return signal

    def within(self, value: Value, item: ast.withitem, body: Any) -> Signal | None:
        """Runs a with body inside a context."""
        raise NotImplementedError

    def _with_generator(self, node: ast.With | ast.AsyncWith, item: ast.withitem, rest: list[ast.withitem], value: Stream) -> Signal | None:
        """A context manager made of a generator: the body runs at its yield."""
        caller = self.frame
        marker = object()
        left: list[Signal | None] = [None]

        def body(yielded: Value) -> None:
            maker, outer = self.frame, self.managing
            self.frame = caller
            try:
                if item.optional_vars is not None:
                    self.assign(item.optional_vars, yielded)
                self.managing = []
                left[0] = self._with_items(node, rest)
            finally:
                self.frame, self.managing = maker, outer

        assert value.call is not None
        self.managing.append(item.context_expr)
        try:
            value.call(body)
        except Leave as leave:
            if leave.owner is not marker:
                raise
        finally:
            self.managing.pop()
        return left[0]

    def _exec_Try(self, node: ast.Try) -> Signal | None:
        handlers = [handler for handler in node.handlers if self._swallows(handler)]
        hang_on_exception(self, node)
        kinds = self.index.kinds(node.body)
        # Around the step alone gradients are reduced already: what overflows there does so on every rank.
        skip = (
            self._note_exception(node, handlers[0], kinds)
            if handlers
            and Kind.BACKWARD in kinds
            and (self.recorder.turns or not any(self.index.reaches_backward_in_loop(one) for one in node.body))
            else None
        )
        start = len(self.recorder.events)
        try:
            with self.recorder.passed_over(skip):
                signal = self.block(node.body)
            if handlers and skip is None and signal is None:
                self._note_failed_forward(node, handlers[0], start)
        finally:
            if node.finalbody:
                self.block(node.finalbody)
        if signal is not None and signal.kind == "raise" and node.handlers:
            signal = self.block(node.handlers[0].body)
        elif signal is None and node.orelse:
            signal = self.block(node.orelse)
        return signal

    _exec_TryStar = _exec_Try

    def _swallows(self, handler: ast.ExceptHandler) -> bool:
        name = self.recorder.text(handler.type) if handler.type is not None else ""
        if any(
            word in name
            for word in (
                "Stop",
                "Interrupt",
                "Import",
                "Exhaust",
                "Empty",
                "EOF",
                "End",
                "Key",
                "Index",
                "Attribute",
                "Type",
                "File",
                "Name",
                "Overflow",
            )
        ):
            return False
        return not self.index.once("reraises", handler, lambda _: _reraises(handler))

    def _note_failed_forward(self, node: ast.Try, handler: ast.ExceptHandler, start: int) -> None:
        """A forward that fails, and a handler that leaves before the backward: what comes after is what this leaves out."""
        if not any(event.kind is Kind.FORWARD for event in self.recorder.events[start:]):
            return
        lost = [*node.orelse, *(self.index.following(node) if ways_out(handler.body) & {"continue", "return"} else ())]
        kinds = self.index.kinds(lost)
        if Kind.BACKWARD in kinds:
            self._note_exception(node, handler, kinds, lost)

    def _note_exception(
        self, node: ast.Try, handler: ast.ExceptHandler, kinds: frozenset[Kind], lost: Sequence[ast.stmt] = ()
    ) -> Event | None:
        raises = any(isinstance(part, ast.Raise) for part in handler.body)
        if raises:
            return None
        text = f"except {ast.unparse(handler.type)}" if handler.type is not None else "except"
        guard = Guard(self.recorder.place(handler), text, "exception", True)
        leaves = sorted(ways_out(handler.body))
        options = frozenset({"zero-loss"} if self._catches_up(node, handler) else ())
        if advances(self.index, lost) and not advances(self.index, handler.body):
            options |= {"counted"}
        how = leaves[0] if leaves else "except"
        return self.recorder.emit(Kind.SKIP, handler, guard=guard, skipped=kinds, leaves=how, options=options)

    def _catches_up(self, node: ast.Try, handler: ast.ExceptHandler) -> bool:
        """Whether a loss times zero goes backward in the place of what failed: in the handler, or behind a flag that it sets."""
        raised = [part for part in walk(handler) if isinstance(part, ast.Assign) and isinstance(part.value, ast.Constant)]
        flags = {target.id for part in raised for target in part.targets if isinstance(target, ast.Name)}
        after = [each for each in self.index.following(node) if isinstance(each, ast.If) and isinstance(each.test, ast.Name)]
        ways = [handler.body, *(each.body for each in after if isinstance(each.test, ast.Name) and each.test.id in flags)]
        return any(Kind.BACKWARD in self.index.kinds(way) and self._is_zero(way) for way in ways)

    def _is_zero(self, body: list[ast.stmt]) -> bool:
        calls = [part for each in body for part in walk(each) if isinstance(part, ast.Call)]
        called = [function for call in calls for function in self.index.callees(call)]
        return multiplies_by_zero([*body, *(each for function in called for each in function.body)])

    def _exec_Match(self, node: ast.Match) -> Signal | None:
        subject = self.force(self.eval(node.subject))
        hang_on(self, [node], subject, self.recorder.text(node.subject))
        for case in node.cases:
            answer = self._matches(case, subject)
            if answer:
                return self._in_case(node, case, subject)
        return None

    def _in_case(self, node: ast.Match, case: ast.match_case, subject: Value) -> Signal | None:
        if not isinstance(subject, Opaque):
            return self.block(case.body)
        self.recorder.guards.append(Guard(self.recorder.place(node.subject), self.recorder.text(node.subject), "setting"))
        try:
            return self.block(case.body)
        finally:
            self.recorder.guards.pop()

    def _matches(self, case: ast.match_case, subject: Value) -> bool:
        pattern = case.pattern
        if isinstance(pattern, ast.MatchAs) and pattern.pattern is None:
            if pattern.name is not None:
                self._bind(pattern.name, subject)
            return case.guard is None or self.truth(self.eval(case.guard))
        if isinstance(pattern, ast.MatchValue):
            wanted = self.force(self.eval(pattern.value))
            if isinstance(wanted, Known) and isinstance(subject, Known):
                return bool(wanted.value == subject.value)
            test = self.opaque(
                ("match", key_of(subject), key_of(wanted)),
                f"{getattr(subject, 'text', 'value')} == {self.recorder.text(pattern.value)}",
                subject,
            )
            kinds = self.index.kinds(case.body)
            return self.truth(test, bool(kinds), flips=bool(kinds), weight=len(kinds))
        if isinstance(pattern, ast.MatchSingleton) and isinstance(subject, Known):
            return subject.value is pattern.value
        test = self.opaque(("match", key_of(subject), case.pattern.lineno), self.recorder.text(case.pattern), subject)
        return self.truth(test, True, flips=bool(self.index.kinds(case.body)))


def _reraises(handler: ast.ExceptHandler) -> bool:
    """Whether a handler always ends the run: what it raises only under a condition of its own does not count."""
    return any(
        isinstance(part, ast.Raise)
        or (
            isinstance(part, ast.Expr)
            and isinstance(part.value, ast.Call)
            and ast.unparse(part.value.func) in {"exit", "sys.exit", "os._exit"}
        )
        for part in handler.body
    )
