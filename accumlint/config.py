"""Settings: `[tool.accumlint]` in pyproject.toml or `accumlint.toml`, the nearest file wins, the command line on top."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any

FILES = ("accumlint.toml", "pyproject.toml")  # in the order of precedence within one folder
OBJECTIVES = ("token", "sample", "sequence")
FORMATS = ("full", "concise", "json", "json-lines", "sarif", "github")
SEVERITIES = ("info", "warning", "error")
ACTIONS = (
    *("forward", "divide", "backward", "unscale", "normalize", "clip", "step", "update", "zero", "schedule", "save", "average"),
    *("no_sync", "accumulate"),
)
DEFAULT_EXCLUDE = (
    ".bzr .direnv .eggs .git .git-rewrite .hg .ipynb_checkpoints .mypy_cache .nox .pants.d .pyenv .pytest_cache .pytype .ruff_cache .svn "
    ".tox .venv .vscode .accumlint_cache __pycache__ __pypackages__ _build buck-out build dist node_modules site-packages venv"
).split()


class ConfigError(Exception):
    """A configuration or an option that cannot be used; the message says what to write instead."""


@dataclass(frozen=True)
class Selection:
    """Which rules are on. Of a select and an ignore that both fit, the more specific wins; `select` None is the default set."""

    select: tuple[str, ...] | None = None
    extend_select: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()

    def enabled(self, code: str, *, by_default: bool) -> bool:
        """Whether a rule is on; `by_default` says whether it is part of the default set (errors and warnings)."""
        chosen = max((_specificity(each, code) for each in (*(self.select or ()), *self.extend_select)), default=-1)
        if self.select is None and by_default:
            chosen = max(chosen, 0)
        return chosen >= 0 and chosen > max((_specificity(each, code) for each in self.ignore), default=-1)


def _specificity(selector: str, code: str) -> int:
    """How closely a selector fits a code; -1 when it does not."""
    if selector == "ALL":
        return 0
    if not selector.startswith("ACC"):
        selector = {name: known for known, name in known_rules().items()}.get(selector, selector)
    return len(selector) if code.startswith(selector) else -1


@dataclass(frozen=True)
class Settings:
    """What one configuration says. Patterns are relative to `root`, the folder of the file that they came from."""

    root: str = field(default_factory=os.getcwd)
    origin: str | None = None  # the file that was read
    selection: Selection = Selection()
    per_file_ignores: tuple[tuple[str, tuple[str, ...]], ...] = ()
    exclude: tuple[str, ...] = tuple(DEFAULT_EXCLUDE)
    extend_exclude: tuple[str, ...] = ()
    src: tuple[str, ...] = (".", "src")
    max_warnings: int | None = None
    objective: str = "token"
    accumulation_names: tuple[str, ...] = ()
    wrappers: tuple[tuple[str, tuple[str, ...]], ...] = ()
    severity: tuple[tuple[str, str], ...] = ()
    output_format: str = "full"
    cache_dir: str | None = None

    @property
    def excluded(self) -> tuple[str, ...]:
        return self.exclude + self.extend_exclude

    @property
    def source_roots(self) -> tuple[str, ...]:
        return tuple(os.path.normpath(os.path.join(self.root, each)) for each in self.src)

    def severities(self) -> dict[str, str]:
        """Severities that the configuration changed, by code."""
        names = {name: code for code, name in known_rules().items()} if self.severity else {}
        return {names.get(selector, selector): level for selector, level in self.severity}

    def with_table(self, table: Mapping[str, Any], where: str) -> Settings:
        """These settings with those of a table on top. A `select` there starts the selection of rules anew."""
        changes: dict[str, Any] = {}
        chosen: dict[str, tuple[str, ...]] = {}
        for key, value in table.items():
            read = _READERS.get(key)
            if read is None:
                raise ConfigError(f"{where}: unknown key `{key}`{suggestion(key, _READERS)}")
            parsed = read(value, f"{where}: `{key}`")
            if key in {"select", "extend-select", "ignore"}:
                chosen[key] = parsed
            elif key in {"severity", "wrappers"}:
                changes[key] = tuple((dict(getattr(self, key)) | dict(parsed)).items())
            else:
                changes[key.replace("-", "_")] = parsed
        if chosen:
            changes["selection"] = _layered(self.selection, chosen)
        return replace(self, **changes)


def _layered(base: Selection, chosen: Mapping[str, tuple[str, ...]]) -> Selection:
    if "select" in chosen:
        return Selection(chosen["select"], chosen.get("extend-select", ()), chosen.get("ignore", ()))
    return Selection(base.select, base.extend_select + chosen.get("extend-select", ()), base.ignore + chosen.get("ignore", ()))


@cache
def known_rules() -> dict[str, str]:
    """Names of all rules by code, read off the file names so that no rule is imported for it."""
    import pkgutil
    from importlib.util import find_spec

    spec = find_spec("accumlint.rules")
    places = spec.submodule_search_locations if spec is not None else None
    stems = sorted(module.name for module in pkgutil.iter_modules(list(places or ())))
    split = (stem.partition("_") for stem in stems if stem.startswith("acc"))
    return {code.upper(): rest.replace("_", "-") for code, _, rest in split}


def check_selector(selector: str, where: str) -> str:
    """The selector in its canonical spelling; an unknown one is an error that names the nearest valid one."""
    rules = known_rules()
    upper, lower = selector.strip().upper(), selector.strip().lower()
    if upper == "ALL" or (upper.startswith("ACC") and any(code.startswith(upper) for code in rules)):
        return upper
    if lower in rules.values():
        return lower
    known = [*rules, *rules.values(), *{code[:4] for code in rules}, "ALL"]
    raise ConfigError(f"{where}: no rule is called `{selector.strip()}`{suggestion(selector.strip(), known)}")


def suggestion(word: str, known: Any) -> str:
    """`, did you mean ...?` for the nearest known word, or a list of the known ones if they are few."""
    import difflib

    words = {str(each).lower(): str(each) for each in known}
    near = difflib.get_close_matches(word.lower(), list(words), n=1, cutoff=0.5)
    if near:
        return f", did you mean `{words[near[0]]}`?"
    if len(words) <= 20:
        return "; known are " + ", ".join(f"`{each}`" for each in sorted(words.values()))
    return "; `accumlint rule --all` lists the rules"


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"{where} must be a string, not {_typename(value)}")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise ConfigError(f"{where} must be a list of strings, not {_typename(value)}")
    for each in value:
        if not isinstance(each, str):
            raise ConfigError(f"{where} must hold nothing but strings, not {_typename(each)}")
    return tuple(value)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} must be a table, not {_typename(value)}")
    return value


def _typename(value: Any) -> str:
    names = {bool: "true or false", int: "a number", float: "a number", str: "a string", list: "a list", dict: "a table"}
    return names.get(type(value), type(value).__name__)


def _one_of(value: Any, where: str, known: tuple[str, ...]) -> str:
    text = _text(value, where)
    if text not in known:
        raise ConfigError(f"{where} is `{text}`{suggestion(text, known)}")
    return text


def _count(value: Any, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ConfigError(f"{where} must be a whole number, 0 or more")
    return value


def _codes(value: Any, where: str) -> tuple[str, ...]:
    return tuple(check_selector(each, where) for each in _texts(value, where))


def _ignores(value: Any, where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    return tuple((pattern, _codes(codes, f"{where} for {pattern}")) for pattern, codes in _table(value, where).items())


def _severity(value: Any, where: str) -> tuple[tuple[str, str], ...]:
    levels: list[tuple[str, str]] = []
    for selector, level in _table(value, where).items():
        code = check_selector(selector, where)
        if code not in known_rules() and code not in known_rules().values():
            raise ConfigError(f"{where} takes whole codes, not `{selector}`{suggestion(selector, known_rules())}")
        levels.append((code, _one_of(level, f"{where} of {selector}", SEVERITIES)))
    return tuple(levels)


def _wrappers(value: Any, where: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    for name in _table(value, where):
        if not all(part.isidentifier() for part in name.split(".")):
            raise ConfigError(f'{where}: `{name}` is no dotted name such as "mylib.amp.Scaler.__call__"')
    return tuple(
        (name, tuple(_one_of(action, f"{where} {name}", ACTIONS) for action in _texts(actions, f"{where} {name}")))
        for name, actions in value.items()
    )


_READERS: dict[str, Callable[[Any, str], Any]] = {
    "select": _codes,
    "extend-select": _codes,
    "ignore": _codes,
    "per-file-ignores": _ignores,
    "exclude": _texts,
    "extend-exclude": _texts,
    "src": _texts,
    "max-warnings": _count,
    "objective": lambda value, where: _one_of(value, where, OBJECTIVES),
    "accumulation-names": _texts,
    "wrappers": _wrappers,
    "severity": _severity,
    "output-format": lambda value, where: _one_of(value, where, FORMATS),
    "cache-dir": _text,
}


def read_toml(data: bytes, where: str) -> dict[str, Any]:
    """A TOML document; what is wrong with a broken one is said in one line."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        return tomllib.loads(data.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise ConfigError(f"{where}: not UTF-8; save the file as UTF-8") from None
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where}: not valid TOML: {error}") from None
    except RecursionError:
        raise ConfigError(f"{where}: nested too deeply") from None


def from_file(path: str) -> Settings:
    """The settings of a named file; a pyproject.toml may hold none."""
    table = _table_of(path)
    root = os.path.dirname(os.path.abspath(path))
    return Settings(root, path).with_table(table or {}, shown(path))


def in_folder(folder: str) -> Settings | None:
    """The settings of a folder's own configuration file, or None where it has none."""
    for name in FILES:
        path = os.path.join(folder, name)
        if os.path.isfile(path):
            table = _table_of(path)
            if table is not None:
                return Settings(os.path.abspath(folder), path).with_table(table, shown(path))
    return None


def nearest(folder: str) -> Settings:
    """The settings of the nearest configuration file in a folder or above it; without one, those of the current folder."""
    here = os.path.abspath(folder)
    while True:
        found = in_folder(here)
        if found is not None:
            return found
        parent = os.path.dirname(here)
        if parent == here:
            return Settings()
        here = parent


def _table_of(path: str) -> Mapping[str, Any] | None:
    """The table of a configuration file; None for a pyproject.toml without one."""
    try:
        with open(path, "rb") as file:
            data = file.read()
    except OSError as error:
        raise ConfigError(f"{shown(path)}: cannot be read: {error.strerror}") from None
    project = os.path.basename(path) == "pyproject.toml"
    if project and b"accumlint" not in data:
        return None
    document = read_toml(data, shown(path))
    if not project:
        return document
    tool = document.get("tool")
    table = tool.get("accumlint") if isinstance(tool, Mapping) else None
    return None if table is None else _table(table, f"{shown(path)}: [tool.accumlint]")


def shown(path: str) -> str:
    """A path as it is shown: relative to the current folder if it lies below it."""
    full, here = os.path.abspath(path), os.getcwd()
    if full.startswith(here + os.sep):
        return full[len(here) + 1 :]
    return full


def described(settings: Settings) -> str:
    """The settings as TOML, for --show-settings."""
    import json

    lines = [f"# {shown(settings.origin)}" if settings.origin else "# defaults: no configuration file"]
    selection = settings.selection
    values: dict[str, Any] = {
        "select": None if selection.select is None else list(selection.select),
        "extend-select": list(selection.extend_select),
        "ignore": list(selection.ignore),
    }
    for each in fields(settings):
        if each.name not in {"root", "origin", "selection"}:
            values[each.name.replace("_", "-")] = getattr(settings, each.name)
    tables = [key for key in values if key in {"per-file-ignores", "wrappers", "severity"}]
    lines += [f"{key} = {json.dumps(value)}" for key, value in values.items() if value is not None and key not in tables]
    for key in tables:
        if values[key]:
            lines += ["", f"[{key}]", *(f"{json.dumps(name)} = {json.dumps(value)}" for name, value in values[key])]
    return "\n".join(lines)


class Configuration:
    """The settings of every folder: its nearest configuration file's with the command line's on top."""

    def __init__(self, overrides: Callable[[Settings], Settings] = lambda settings: settings, fixed: Settings | None = None) -> None:
        self._overrides = overrides
        self._fixed = None if fixed is None else overrides(fixed)
        self._known: dict[str, Settings] = {}
        self._by_origin: dict[tuple[str | None, str], Settings] = {}

    def of(self, folder: str) -> Settings:
        """The settings of an absolute folder."""
        if self._fixed is not None:
            return self._fixed
        if folder not in self._known:
            self._known[folder] = self._on_top(nearest(folder))
        return self._known[folder]

    def below(self, folder: str, above: Settings, names: set[str]) -> Settings:
        """The settings of a folder in a walk, given those of the folder above and the names of what it holds."""
        if self._fixed is not None or not any(name in names for name in FILES):
            return above
        own = in_folder(folder)
        return above if own is None else self._on_top(own)

    def _on_top(self, settings: Settings) -> Settings:
        key = (settings.origin, settings.root)
        if key not in self._by_origin:
            self._by_origin[key] = self._overrides(settings)
        return self._by_origin[key]
