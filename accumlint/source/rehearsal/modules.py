"""Imports: what a name from another file of the program is, and what a module gives."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from contextlib import contextmanager

from accumlint.source.reading.library import Definition
from accumlint.source.rehearsal.state import Frame, State
from accumlint.source.rehearsal.values import Module, Value

DEFINES = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class Modules(State):
    """Binds what imports bring, and runs the statements of a followed module when it is first asked for a name."""

    __slots__ = ()

    def _exec_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            name = alias.asname or alias.name.split(".")[0]
            path = alias.name if alias.asname else name
            self._bind(name, self._brought(alias, path, name))

    def _exec_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name == "*":
                self._bind_all(alias)
                continue
            path = f"{'.' * node.level}{node.module or ''}.{alias.name}"
            self._bind(alias.asname or alias.name, self._brought(alias, path, alias.name))

    def _brought(self, alias: ast.alias, path: str, name: str) -> Value:
        """What an import brings: a followed definition, a module of the project, or something known by its path only."""
        link = self.program.links.get(id(alias)) if self.program is not None else None
        if link is not None:
            found = self._meant(link, path)
            if found is not None:
                return found
            if link.dotted:
                path, name = link.dotted, link.dotted.rsplit(".", 1)[-1]
        return self.opaque(("import", path), alias.asname or alias.name.split(".")[0], path=path, name=name)

    def _bind_all(self, alias: ast.alias) -> None:
        for name, link in (self.program.stars.get(id(alias), {}) if self.program is not None else {}).items():
            found = self._meant(link, name)
            if found is not None:
                self._bind(name, found)

    def _meant(self, link: Definition, path: str) -> Value | None:
        if link.name:
            return self.global_of(link.path, link.name)
        return Module(link.path, path) if link.path else None

    def global_of(self, path: str, name: str) -> Value | None:
        """A name of a module; None where the module was not followed, or does not bind it (yet)."""
        if self.program is not None and path == self.program.path:
            return self.globals.names.get(name)
        frame = self.modules.get(path)
        if frame is None:
            if self.program is None or path not in self.program.kept:
                return None
            frame = self._import_module(path)
        return frame.names.get(name)

    def _import_module(self, path: str) -> Frame:
        assert self.program is not None
        frame = self.modules[path] = Frame()
        quiet = [node for node in self.program.kept[path] if isinstance(node, DEFINES) or not self.index.kinds(node)]
        with self._aside(frame):
            self.block(quiet)
        return frame

    @contextmanager
    def _aside(self, frame: Frame) -> Iterator[None]:
        """Runs in a frame of its own, outside of all loops and contexts."""
        kept = (self.frame, self.recorder.turns, self.recorder.guards, self.running, self.no_grad, self.forward)
        self.frame, self.recorder.turns, self.recorder.guards, self.running, self.no_grad, self.forward = frame, [], [], [], 0, None
        try:
            yield
        finally:
            self.frame, self.recorder.turns, self.recorder.guards, self.running, self.no_grad, self.forward = kept

    def module_attribute(self, module: Module, name: str) -> Value:
        known = module.attributes.get(name)
        if known is not None:
            return known
        dotted = f"{module.dotted}.{name}"
        link = self.program.library.define(module.path, name) if self.program is not None and self.program.library is not None else None
        found = self._meant(link, dotted) if link is not None else None
        if found is None:
            frame = self.modules.get(module.path)
            found = frame.names.get(name) if frame is not None else None
        if found is None:
            path = link.dotted if link is not None and link.dotted else dotted
            found = self.opaque(("import", path), dotted, path=path, name=name)
        module.attributes[name] = found
        return found
