"""Imported by every interpreter of an observed run: starts the probes as soon as the program has imported torch.

It imports the sitecustomize that it shadows, and takes its own folder off `sys.path`: the program sees the path that it
would have had.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # typing is not imported in a program that may not need it
if TYPE_CHECKING:
    from typing import Any

ENV = "ACCUMLINT_VERIFY"
FOLDER = os.path.dirname(os.path.abspath(__file__))


def _note(stage: str) -> None:
    """Leaves word of an internal failure in the folder of the run; never raises."""
    try:
        import json
        import traceback

        folder = json.loads(os.environ[ENV])["folder"]
        with open(os.path.join(folder, f"trouble-{os.getpid()}.txt"), "a", encoding="utf-8") as file:
            file.write(f"{stage}: {traceback.format_exc()}\n")
    except Exception:
        pass


def _package() -> None:
    """Makes accumlint importable from where this file lies, without what else is installed there."""
    import importlib.util

    if "accumlint" in sys.modules:
        return
    root = os.path.dirname(os.path.dirname(FOLDER))
    spec = importlib.util.spec_from_file_location("accumlint", os.path.join(root, "__init__.py"), submodule_search_locations=[root])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["accumlint"] = module
    spec.loader.exec_module(module)


def _start() -> None:
    try:
        _package()
        import importlib

        settings = importlib.import_module("accumlint.runtime.settings").Settings.from_json(os.environ[ENV])
        importlib.import_module("accumlint.runtime.agent").observe(settings)
    except Exception:
        _note("the probes could not be started")


class _AfterTorch:
    """Finds torch as the others would, and lets its loader call `_start` at the end."""

    def __init__(self) -> None:
        self.asking = False

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name != "torch" or self.asking:
            return None
        self.asking = True
        try:
            return self._followed()
        except Exception:
            _note("torch could not be hooked")
            return None
        finally:
            self.asking = False

    def _followed(self) -> Any:
        """The spec of torch; a program that only asks whether there is torch gets the same as one that imports it."""
        import importlib.util

        spec = importlib.util.find_spec("torch")
        if spec is None or spec.loader is None:
            return None
        loader: Any = spec.loader  # annotations of local names are not evaluated
        execute = loader.exec_module

        def exec_module(module: Any) -> None:
            del loader.exec_module  # nothing of this stays behind
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            _start()

        loader.exec_module = exec_module
        return spec


def _inject() -> None:
    try:
        if not os.environ.get(ENV):
            return
        if "torch" in sys.modules:
            _start()
        else:
            sys.meta_path.insert(0, _AfterTorch())
    except Exception:
        _note("the interpreter could not be prepared")


def _shadowed() -> None:
    """Imports the sitecustomize that would have been imported without this one; what it raises is its own."""
    from importlib.machinery import PathFinder

    sys.path[:] = [each for each in sys.path if os.path.abspath(each or ".") != FOLDER]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


_inject()
_shadowed()
