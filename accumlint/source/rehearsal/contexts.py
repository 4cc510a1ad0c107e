"""Contexts: what holds while a with body, or an exit stack, is open."""

from __future__ import annotations

import ast
from collections.abc import Callable

from accumlint.source.rehearsal.state import Signal, State
from accumlint.source.rehearsal.values import (
    Context,
    Instance,
    Known,
    Stream,
    Value,
    actor_of,
)
from accumlint.trace import Kind


class Contexts(State):
    """Enters and leaves context managers."""

    __slots__ = ()

    def within_context(self, kind: str) -> bool:
        return any(context.kind == kind for context in self.contexts)

    def enter(self, context: Context, node: ast.AST) -> None:
        self.contexts.append(context)
        if context.entering is not None:
            context.entering(self, node)
        if context.kind == "no_grad":
            self.no_grad += 1
        elif context.kind == "no_sync":
            node = self.managing[0] if self.managing else node
            self.recorder.emit(Kind.SYNC_OFF, node, model=actor_of(self.force(context.models[0])), options=frozenset({"context"}))

    def leave(self, context: Context, node: ast.AST) -> None:
        for inner in reversed(context.entered):
            self.leave(inner, node)
        context.entered.clear()
        if context in self.contexts:
            self.contexts.remove(context)
            if context.kind == "no_grad":
                self.no_grad -= 1
            if context.leaving is not None:
                context.leaving(self, node)

    def within(self, value: Value, item: ast.withitem, body: Callable[[], Signal | None]) -> Signal | None:
        value = self.force(value)
        if isinstance(value, Instance):
            return self._within_instance(value, item, body)
        context = value if isinstance(value, Context) else Context("other")
        given: Value = (
            context.value
            if context.value is not None
            else value
            if isinstance(value, (Context, Stream))  # a progress bar around what is gone over is that
            else self.opaque(("as", item.context_expr.lineno), "as")
        )
        self.enter(context, item.context_expr)
        try:
            if item.optional_vars is not None:
                self.assign(item.optional_vars, given)
            return body()
        finally:
            self.leave(context, item.context_expr)

    def _within_instance(self, value: Instance, item: ast.withitem, body: Callable[[], Signal | None]) -> Signal | None:
        entered: Value = value
        if value.cls.find("__enter__") is not None:
            entered = self.call_value(self.attribute(value, "__enter__", item.context_expr), [])
        if item.optional_vars is not None:
            self.assign(item.optional_vars, entered)
        try:
            return body()
        finally:
            if value.cls.find("__exit__") is not None:
                self.call_value(self.attribute(value, "__exit__", item.context_expr), [Known(None), Known(None), Known(None)])
