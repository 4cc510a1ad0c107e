"""What has to be done when the program imports a module that it may never import."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from accumlint.runtime.patches import Patches
from accumlint.runtime.recorder import Recorder

Action = Callable[[Any], object]


def when_imported(recorder: Recorder, patches: Patches, name: str, action: Action) -> None:
    """Calls `action(module)` now, where the module is imported already, or right after it has been executed."""

    def act(module: Any) -> None:
        if not recorder.active:
            return
        try:
            action(module)
        except Exception as error:
            recorder.trouble(f"{name}: {type(error).__name__}: {error}")

    module = sys.modules.get(name)
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        act(module)
        return
    finder = next((each for each in sys.meta_path if isinstance(each, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
        patches.on_undo(finder.leave)
    finder.actions.setdefault(name, []).append(act)


class _Finder:
    """Finds what the others find, and follows the execution of the modules that someone waits for."""

    def __init__(self) -> None:
        self.actions: dict[str, list[Action]] = {}
        self._asking = False

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if self._asking or name not in self.actions:
            return None
        self._asking = True
        try:
            spec = importlib.util.find_spec(name)
        finally:
            self._asking = False
        if spec is not None and spec.loader is not None:
            self._follow(name, spec.loader)
        return spec

    def _follow(self, name: str, loader: Any) -> None:
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module
            execute(module)
            for action in self.actions.pop(name, ()):
                action(module)

        loader.exec_module = exec_module

    def leave(self) -> None:
        self.actions.clear()
        if self in sys.meta_path:
            sys.meta_path.remove(self)
