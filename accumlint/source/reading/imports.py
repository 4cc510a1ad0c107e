"""Finds the files of a project that import statements mean. Nothing outside the project's root is looked at."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from accumlint.source.reading.disk import contents

MARKERS = frozenset({"pyproject.toml", "setup.py", "setup.cfg", ".git", ".hg", "accumlint.toml"})  # what the root of a project holds
# What their vocabularies know better than their sources would tell, also in the frameworks' own repositories.
SPOKEN_FOR = frozenset(
    """
    accelerate catalyst composer deepspeed fastai ignite lightning lightning_fabric mmcv mmengine pytorch_lightning torchtune
    transformers trl
    """.split()
)
ITSELF = "torch"  # its own files hold no training loop in parts
HIGHEST = 16  # folders that are climbed in search of the root
ADDS = re.compile(rb"sys\.path\.(append|insert|extend)\(")  # to the folders in which modules are looked for
OWN = re.compile(rb"(?P<before>.{0,60})__file__(?P<after>[^\n]{0,100})", re.DOTALL)
MOST_ADDED = 3  # folders above a file that it may put on the path


class Folders:
    """The names in each folder that was asked about, listed once."""

    def __init__(self) -> None:
        self._names: dict[str, frozenset[str]] = {}
        self._roots: dict[str, str] = {}

    def names(self, folder: str) -> frozenset[str]:
        known = self._names.get(folder)
        if known is None:
            try:
                known = frozenset(os.listdir(folder))
            except OSError:
                known = frozenset()
            self._names[folder] = known
        return known

    def holds(self, folder: str, name: str) -> bool:
        return name in self.names(folder)

    def root(self, folder: str) -> str:
        """The nearest folder above that a project begins at; without a mark of one, where the package begins."""
        known = self._roots.get(folder)
        if known is None:
            known = self._roots[folder] = self._find_root(folder)
        return known

    def package(self, folder: str) -> str:
        """The outermost folder that is a package and holds this one; the folder itself where it is none."""
        while self.holds(folder, "__init__.py") and self.holds(os.path.dirname(folder), "__init__.py"):
            folder = os.path.dirname(folder)
        return folder

    def _find_root(self, folder: str) -> str:
        current = folder
        for _ in range(HIGHEST):
            if self.names(current) & MARKERS:
                return current
            above = os.path.dirname(current)
            if above == current:
                break
            current = above
        current = folder
        while self.holds(current, "__init__.py") and os.path.dirname(current) != current:
            current = os.path.dirname(current)
        return current  # the folder that holds the package


class Imports:
    """Resolves the imports of a project's files."""

    def __init__(self, configured: Sequence[str] = ()) -> None:
        self.folders = Folders()
        self.configured = tuple(map(os.path.normpath, configured))
        self._roots: dict[str, tuple[str, ...]] = {}
        self._found: dict[tuple[str, str], tuple[str | None, frozenset[str]]] = {}
        self._added: dict[str, tuple[str, ...]] = {}
        self.asked: set[str] = set()  # folders that answers rested on since somebody emptied this

    def roots(self, folder: str) -> tuple[str, ...]:
        """The folders in which the modules that a file of this folder imports are looked for: its own first, then upwards."""
        known = self._roots.get(folder)
        if known is None:
            top = self.folders.root(folder)
            above = [folder]
            while above[-1] != top and os.path.dirname(above[-1]) != above[-1]:
                above.append(os.path.dirname(above[-1]))
            inside = [each for each in self.configured if each == top or each.startswith(top + os.sep)]
            sources = [os.path.join(top, "src")] if self.folders.holds(top, "src") else []
            known = self._roots[folder] = tuple(dict.fromkeys((folder, *inside, *above[1:], *sources)))
        return known

    def module(self, path: str, dotted: str, level: int = 0) -> str | None:
        """The file of a module that is imported in `path`; for a package without `__init__.py` its folder, with a separator at its end."""
        if not level and dotted.partition(".")[0] in SPOKEN_FOR:
            return None
        folder = os.path.dirname(path)
        if os.sep + ITSELF + os.sep in path and os.path.basename(self.folders.package(folder)) == ITSELF:
            return None
        found = self._known((folder, "." * level + dotted), folder, dotted, level)
        if found == path:  # a file does not import itself: `import model` in utils/model.py means another one
            found = self._known((path, dotted), folder, dotted, level, besides=path)
        if found is None and not level and dotted:
            found = next((one for root in self._added_by(path) if (one := self.below(root, dotted.split("."))) is not None), None)
        return found

    def _added_by(self, path: str) -> tuple[str, ...]:
        """The folders above a file that it puts on the path itself: `sys.path.append(os.path.join(os.path.dirname(__file__), ".."))`."""
        known = self._added.get(path)
        if known is None:
            above = [os.path.dirname(path)]
            for _ in range(_levels_added(path)):
                above.append(os.path.dirname(above[-1]))
            known = self._added[path] = tuple(above[1:])
        return known

    def _known(self, key: tuple[str, str], folder: str, dotted: str, level: int, besides: str = "") -> str | None:
        if key not in self._found:
            others, self.asked = self.asked, set()
            found = self._find(folder, dotted, level, besides)
            self._found[key] = found, frozenset(self.asked)
            self.asked = others
        found, asked = self._found[key]
        self.asked |= asked
        return found

    def _find(self, folder: str, dotted: str, level: int, besides: str) -> str | None:
        parts = dotted.split(".") if dotted else []
        if level:
            top = self.folders.root(folder)
            for _ in range(level - 1):
                if folder == top:
                    return None
                folder = os.path.dirname(folder)
            return self.below(folder, parts)
        packages = None
        for root in (*self.roots(folder), *self._holders(folder, parts[:1])):
            found = self.below(root, parts)
            if found is not None and not found.endswith(os.sep) and found != besides:
                return found
            packages = packages or (found if found != besides else None)
        return packages

    def _holders(self, folder: str, first: Sequence[str]) -> tuple[str, ...]:
        """Where nothing marks the project's root: the folder that holds the package without `__init__.py` of that name round this one."""
        top = self.folders.root(folder)
        if self.folders.names(top) & MARKERS or not first or first[0] not in top.split(os.sep)[1:]:
            return ()
        path = top.split(os.sep)
        return (os.sep.join(path[: len(path) - 1 - path[::-1].index(first[0])]) or os.sep,)

    def below(self, folder: str, parts: Sequence[str]) -> str | None:
        """The file of a module below a folder, by the parts of its name."""
        for part in parts[:-1]:
            self.asked.add(folder)
            if not self.folders.holds(folder, part):
                return None
            folder = os.path.join(folder, part)
        self.asked.add(folder)
        if parts:
            last = parts[-1]
            names = self.folders.names(folder)
            inner = os.path.join(folder, last)
            if last in names and (not self.folders.holds(inner, "__init__.py")) and f"{last}.py" in names:
                return os.path.join(folder, f"{last}.py")
            if last not in names:
                return os.path.join(folder, f"{last}.py") if f"{last}.py" in names else None
            folder = inner
        names = self.folders.names(folder)
        if "__init__.py" in names:
            return os.path.join(folder, "__init__.py")
        return folder + os.sep if names else None

    def submodule(self, path: str, name: str) -> str | None:
        """The module of that name in a package, which is given by its `__init__.py` or its folder."""
        if path.endswith(os.sep):
            return self.below(path.rstrip(os.sep), [name])
        return self.below(os.path.dirname(path), [name]) if os.path.basename(path) == "__init__.py" else None


def _levels_added(path: str) -> int:
    """How many levels above its own folder a file goes for what it puts on the path."""
    try:
        data = contents(path, 100_000)
    except OSError:
        return 0
    if not ADDS.search(data):
        return 0
    return min(MOST_ADDED, max(map(_levels, OWN.finditer(data)), default=0))


def _levels(match: re.Match[bytes]) -> int:
    before, after = match["before"], match["after"]
    up = after.count(b"pardir") + after.count(b"..")
    return up + max(0, before.count(b"dirname(") - 1) + max(0, after.count(b".parent") - 1)
