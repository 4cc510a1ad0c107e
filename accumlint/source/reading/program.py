"""A program: a file and what of the project's other files it reaches, as far as that matters to training.

The statements of all its files stand in one tree, in which every line has a number of its own, so that whatever asks by
name or by line works on several files as on one. Which name means what is kept by module.
"""

from __future__ import annotations

import ast
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from accumlint.source.reading.library import Definition, Library
from accumlint.source.reading.outline import Imported, Outline, Piece
from accumlint.source.reading.parse import Source
from accumlint.source.reading.slices import prune
from accumlint.source.reading.words import WRAPPER_NAMES
from accumlint.trace import FILE_LINES

LONG_FILE = 1_500  # lines; what training cannot reach is cut out of a longer file before anything walks over it
MOST_FILES = 20
MOST_ENDS = 8  # of the trail that are told
MOST_READ = 40  # files that are looked into
MOST_STATEMENTS = 6_000  # at the top level that are asked for
MOST_KEPT = 4_000  # statements, in all, that are followed
NEAR = 2  # how far from the file, or from what trains, losses, settings and evidence are of use
DEEPEST = 6
SMALL = 40  # statements: what is this small is followed even if it has no word of training
TINY = 8  # statements: what is this small costs nothing
PADDING = re.compile(r"^[A-Z_]*(IGNORE|PAD|LABEL)[A-Z_]*$")  # constants that may be what the losses ignore
DATA = re.compile(r"data_?set|data_?(load|module)|collat", re.IGNORECASE)  # what may ignore, mask or pad targets
BY_NAME = ("Scheduler", "Schedule", "LR")  # ends of the names of classes that are better known by their names


@dataclass(frozen=True)
class Joined:
    """A class of another file that is thought to be what a method of its is called on, though no import leads there."""

    path: str
    name: str
    method: str


@dataclass
class Program:
    """A file with what was followed. `links` tells by the id of an imported alias what it brings."""

    source: Source
    outlines: dict[str, Outline] = field(default_factory=dict)  # of the followed files, by path
    kept: dict[str, list[ast.stmt]] = field(default_factory=dict)  # their statements that matter
    links: dict[int, Definition] = field(default_factory=dict)
    stars: dict[int, dict[str, Definition]] = field(default_factory=dict)
    asked: tuple[str, ...] = ()  # files and folders (with a separator at the end) that this rests on
    ends: tuple[str, ...] = ()  # where the trail ended
    library: Library | None = None
    joined: Joined | None = None
    backward: bool = True  # whether some file of it calls a backward, and an update
    update: bool = True

    @property
    def path(self) -> str:
        return self.source.path

    def tree(self) -> ast.Module:
        """All statements: the file's own, then those of the followed ones."""
        if not self.kept:
            return self.source.tree
        return ast.Module([*self.source.tree.body, *(node for nodes in self.kept.values() for node in nodes)], [])

    def statements_of(self, path: str) -> list[ast.stmt]:
        """The statements that are kept of a file."""
        return self.source.tree.body if path == self.path else self.kept.get(path, [])

    def sources(self) -> Iterator[Source]:
        """The files, its own first."""
        yield self.source
        yield from (outline.source for outline in self.outlines.values())

    def outline_of(self, line: int) -> Outline | None:
        """The followed file that a line number belongs to; None for the program's own."""
        number = line // FILE_LINES
        return next((outline for outline in self.outlines.values() if outline.number == number), None) if number else None

    def source_of(self, line: int) -> Source:
        outline = self.outline_of(line)
        return outline.source if outline is not None else self.source


def program_of(source: Source, library: Library | None, joined: Joined | None = None) -> Program:
    """The program that starts at a file; of that file alone without a library."""
    if library is None or not (joined or library.leads.imports_some(source.path, source.text.encode("utf-8", "surrogatepass"))):
        return Program(source)
    main = Outline(source)
    if len(source.lines) > LONG_FILE and library.prunes:
        prune(source.tree, source.lines, _project_names(main, library))
        main = Outline(source)
    return _Builder(main, library).built(joined)


def _project_names(outline: Outline, library: Library) -> set[str]:
    """The names that a file imports from files of its project."""
    return {
        name
        for name, (node, alias) in outline.imported.items()
        if (found := library.target(outline, node, alias, 1)) is not None and not found.dotted
    }


class _Builder:
    def __init__(self, main: Outline, library: Library) -> None:
        self.library = library
        library.imports.asked.clear()
        library.looked_at.clear()
        self.main = main
        self.program = Program(main.source, library=library)
        self.pieces: dict[int, Piece] = {}  # demanded, by the id of the statement
        self.order: list[Piece] = []
        self.depth: dict[int, int] = {}
        self.children: dict[int, dict[int, None]] = defaultdict(dict)  # in the order in which they were demanded
        self.read: dict[str, Outline] = {main.path: main}
        self.ends: dict[str, None] = {}
        self.outside: set[tuple[int, int]] = set()  # imports that bring nothing of the project, as far as files had to promise so much
        self.pending: deque[Piece] = deque()

    def built(self, joined: Joined | None) -> Program:
        own = [self._demand(self.main, node, 0, None) for node in self.main.source.tree.body]
        if joined is not None:
            self._join(own, joined)
        while self.pending:
            self._expand(self.pending.popleft())
        kept = self._kept([piece for piece in own if piece is not None])
        program = self.program
        for path, outline in self.read.items():
            if outline is not self.main and any(id(node) in kept for node in outline.source.tree.body):
                program.outlines[path] = outline
                program.kept[path] = [outline.piece(node).kept for node in outline.source.tree.body if id(node) in kept or _is_import(node)]
        program.asked = tuple(sorted(self._asked()))
        program.ends = tuple(self.ends)[:MOST_ENDS]
        pieces = [piece for piece in self.order if piece.outline is self.main or id(piece.node) in kept]
        program.backward = any(piece.backward for piece in pieces)
        program.update = any(piece.update for piece in pieces)
        return program

    def _asked(self) -> Iterator[str]:
        yield from (path for path in {*self.read, *self.library.looked_at} if path != self.main.path and not path.endswith(os.sep))
        yield from (folder.rstrip(os.sep) + os.sep for folder in self.library.imports.asked)

    # What is demanded.
    def _demand(self, outline: Outline, node: ast.stmt, depth: int, parent: Piece | None) -> Piece | None:
        known = self.pieces.get(id(node))
        if known is None:
            if len(self.order) > MOST_STATEMENTS:
                return None
            known = self.pieces[id(node)] = outline.piece(node)
            self.order.append(known)
            self.depth[id(node)] = depth
            self.pending.append(known)
        if parent is not None:
            self.children[id(parent.node)][id(node)] = None
        return known

    def _join(self, own: list[Piece | None], joined: Joined) -> None:
        """What calls the method demands the class."""
        self.program.joined = joined
        for piece in own:
            if piece is not None and any(joined.method in chain for chains in piece.attributes.values() for chain in chains):
                self._define(piece, Definition(joined.path, joined.name))

    def _expand(self, piece: Piece) -> None:
        outline, depth = piece.outline, self.depth[id(piece.node)]
        if _is_import(piece.node):
            return  # what uses its names demands what they mean
        for name in piece.known_names:
            known = outline.imported.get(name)
            if known is not None:
                self._import(piece, *known)
            elif outline.stars and name not in outline.bindings:
                self._star(piece, name)
            if outline is not self.main:
                binding = outline.bindings.get(name, ())
                for node in binding if piece.node not in binding else ():
                    if not _is_import(node):
                        self._demand(outline, node, depth, piece)
        for statement in piece.imports:
            for alias in statement.names:
                if (alias.asname or alias.name.split(".")[0]) in piece.names:
                    self._import(piece, statement, alias)

    def _import(self, piece: Piece, node: Imported, alias: ast.alias) -> None:
        name = alias.asname or alias.name.split(".")[0]
        least = self._least(piece, name)
        if (id(alias), least) in self.outside:
            return
        found = self.program.links.get(id(alias)) or self._target(piece, node, alias, least)
        if found is None or (found.dotted and not found.dotted.startswith(".") and not _renamed(node, alias, found)):
            self.outside.add((id(alias), least))
            return
        self.program.links[id(alias)] = found
        self._reach(piece, found, name)

    def _target(self, piece: Piece, node: Imported, alias: ast.alias, least: int) -> Definition | None:
        """What an import brings, looked for from its own file and then from the folder of the script, which Python searches as well."""
        found = self.library.target(piece.outline, node, alias, least)
        absolute = not isinstance(node, ast.ImportFrom) or not node.level
        if found is not None and found.dotted and absolute and piece.outline is not self.main:
            return self.library.target(self.main, node, alias, least) or found
        return found

    def _least(self, piece: Piece, name: str) -> int:
        """How much a file must promise to be followed into from a statement: anything will do for a base class."""
        if name in piece.bases:
            return 0
        near = piece.outline is self.main or piece.strong or PADDING.search(name) or DATA.search(name)
        return 1 if near or _is_table_of_data(piece.node) else 2

    def _star(self, piece: Piece, name: str) -> None:
        for star in piece.outline.stars:
            path = self.library.imports.module(piece.outline.path, star.module or "", star.level)
            found = self.library.define(path, name, self._least(piece, name)) if path is not None else None
            if found is not None and not found.dotted:
                self.program.stars.setdefault(id(star.names[0]), {})[name] = found
                self._reach(piece, found, name)
                return

    def _reach(self, piece: Piece, found: Definition, name: str) -> None:
        """Demands what an imported name means: a definition, or what is asked of a module."""
        if found.dotted:
            if found.dotted.startswith("."):
                self.ends.setdefault(f"`{found.dotted.lstrip('.')}` could not be followed: no file of this project")
        elif found.name:
            self._define(piece, found)
        else:
            for chain in sorted(piece.attributes.get(name, ())):
                self._member(piece, found.path, chain)

    def _member(self, piece: Piece, path: str, chain: tuple[str, ...]) -> None:
        found = self.library.define(path, chain[0], self._least(piece, chain[0]))
        if found is None or found.dotted:
            return
        if found.name:
            self._define(piece, found)
        elif len(chain) > 1:
            self._member(piece, found.path, chain[1:])

    def _define(self, piece: Piece, found: Definition) -> None:
        depth = self.depth[id(piece.node)] + (found.path != piece.outline.path)
        outline = self.read.get(found.path) or self.library.outline(found.path)
        if outline is None or depth > DEEPEST or (found.path not in self.read and len(self.read) >= MOST_READ):
            why = self.library.problems.get(found.path, "too far from the file")
            self.ends.setdefault(f"`{found.name}` could not be followed: {os.path.basename(found.path)}: {why}")
            return
        self.read.setdefault(found.path, outline)
        for node in outline.bindings.get(found.name, ()):
            if not _known_by_name(node):
                self._demand(outline, node, depth, piece)

    # What of it is kept.
    def _kept(self, own: list[Piece]) -> set[int]:
        """The ids of the demanded statements that matter, or lead to some that do."""
        parents: dict[int, set[int]] = defaultdict(set)
        for parent, children in self.children.items():
            for child in children:
                parents[child].add(parent)
        matters = _led_to({id(piece.node) for piece in self.order if piece.strong}, parents, DEEPEST * 4)
        bare = {id(piece.node) for piece in self.order if piece.is_model and not piece.matters}
        losses = {child: found - bare for child, found in parents.items()}
        matters |= _led_to({id(piece.node) for piece in self.order if piece.matters}, losses, NEAR)
        deriving = (piece for piece in self.order if id(piece.node) in matters and (piece.backward or not piece.is_model))
        bases = {base for piece in (*own, *deriving) for base in piece.bases}
        kept: set[int] = set()
        files: set[str] = set()
        size = 0
        waiting = deque(own)
        while waiting:
            piece = waiting.popleft()
            for number in self.children[id(piece.node)]:
                inner = self.pieces[number]
                small = inner.size <= SMALL and not inner.is_model and not _sets_field(inner.node)
                if number in kept or not (number in matters or small or getattr(inner.node, "name", "") in bases):
                    continue
                full = len(files) >= MOST_FILES and inner.outline.path not in files
                if full or size > (MOST_KEPT if inner.strong or inner.size <= TINY else MOST_KEPT // 3):
                    continue
                size += inner.size
                files.add(inner.outline.path)
                kept.add(number)
                waiting.append(inner)
        return kept


def _led_to(goals: set[int], parents: Mapping[int, set[int]], steps: int) -> set[int]:
    """The statements from which some goal is reached in so many steps, the goals among them."""
    found = set(goals)
    edge = goals
    for _ in range(steps):
        edge = {parent for one in edge for parent in parents.get(one, ())} - found
        if not edge:
            break
        found |= edge
    return found


def _is_import(node: ast.stmt) -> bool:
    return isinstance(node, (ast.Import, ast.ImportFrom))


def _sets_field(node: ast.stmt) -> bool:
    """`settings.train.epochs = 10`: of a table of settings only what matters is kept."""
    return isinstance(node, ast.Assign) and all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets)


def _is_table_of_data(node: ast.stmt) -> bool:
    """`DATASETS = {"dialogues": Dialogues, …}`"""
    return isinstance(node, ast.Assign) and any(isinstance(target, ast.Name) and DATA.search(target.id) for target in node.targets)


def _known_by_name(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and (node.name.endswith(BY_NAME) or node.name in WRAPPER_NAMES or node.name == "GradScaler")


def _renamed(node: Imported, alias: ast.alias, found: Definition) -> bool:
    """Whether a name comes from outside of the project through a module of it."""
    return isinstance(node, ast.ImportFrom) and found.dotted != f"{'.' * node.level}{node.module or ''}.{alias.name}"
