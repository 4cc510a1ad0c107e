"""What a file says about a Transformers Trainer before it is rehearsed: its classes, its model, its labels, its K."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from accumlint.source.reading.facts import FunctionNode, terminal
from accumlint.source.reading.index import Index
from accumlint.source.reading.nodes import every, walk
from accumlint.trace import FILE_LINES

COUNT = "num_items_in_batch"
OVERRIDES = ("training_step", "compute_loss")
COLLECTS = "get_batch_samples"
OWNERS = frozenset({"transformers", "trl", "unsloth"})
PLAIN = frozenset({"Trainer", "Seq2SeqTrainer", "_BaseTrainer"})  # whose division depends on the model
LANGUAGE = frozenset({"SFTTrainer", "GKDTrainer", "UnslothTrainer"})  # the same, and they train language models on labels
LIBRARY_MODEL = re.compile(
    r"(For(CausalLM|\w*LM|SequenceClassification|TokenClassification|QuestionAnswering|MultipleChoice)|LMHeadModel)$|^AutoModelFor"
)
TAKES_KEYWORDS = re.compile(r"CausalLM$|LMHeadModel$")  # since the Trainer counts; the others do from release 5 on
ALL_TAKE_KEYWORDS = (5,)
SEVERAL_INPUTS = re.compile(r"ImageText|Vision|Speech|Audio|CTC|Esm")  # models of which some take no keywords
COLLATORS = frozenset({"DataCollatorForLanguageModeling", "DataCollatorForSeq2Seq", "DataCollatorForTokenClassification"})
LANGUAGE_SIGNS = frozenset({"lm_head", "get_output_embeddings", "get_decoder", "logits_to_keep", "past_key_values"})
ARGUMENTS = re.compile(r"TrainingArguments$|^(SFT|DPO|KTO|ORPO|CPO|GRPO|RLOO|GKD|Reward)Config$")
FLAGS = ("model_accepts_loss_kwargs", "loss_is_scaled_for_ga")


@dataclass(frozen=True)
class TrainerClass:
    """A class of the source that derives from a Trainer (or looks like one), with what it overrides."""

    node: ast.ClassDef
    base: str  # "plain", "language" or "unknown"
    overrides: dict[str, FunctionNode] = field(default_factory=dict)
    family: tuple[ast.ClassDef, ...] = ()  # the class and its bases in the file
    collects: FunctionNode | None = None  # fetches the batches of a window, and counts their targets

    @property
    def first(self) -> FunctionNode:
        """The outermost override, of the file itself if it has one: where a finding that belongs to no line of it is put."""
        found = [self.overrides[name] for name in OVERRIDES if name in self.overrides]
        found += [self.collects] if self.collects is not None else []
        return next((each for each in found if each.lineno < FILE_LINES), found[0])


def trainer_classes(index: Index) -> tuple[TrainerClass, ...]:
    """The classes whose overrides a Trainer calls; not those that only serve as a base of another one in the file."""
    return index.once("trainer classes", index.tree, lambda _: tuple(_trainer_classes(index)))


def _trainer_classes(index: Index) -> list[TrainerClass]:
    found = list(_find_classes(index))
    bases = {id(each) for cls in found if cls.base != "unknown" for each in cls.family[1:]}
    return [cls for cls in found if cls.base != "unknown" or id(cls.node) not in bases]


def _find_classes(index: Index) -> Iterator[TrainerClass]:
    imported = imports(index)
    if _has_own_loop(index):
        return
    for node in index.classes.values():
        family = tuple(_family(index, node))
        members = [member for each in family for member in index.class_methods(each)]
        overrides: dict[str, FunctionNode] = {}
        for member in members:
            if member.name in OVERRIDES:
                overrides.setdefault(member.name, member)
        collects = next((member for member in members if member.name == COLLECTS and is_told_how_many(member)), None)
        if not overrides and collects is None:
            continue
        base = _base(family, imported, index) or _mixin(node, overrides)
        if base or any(takes_count(each, by_name=True) for each in overrides.values()):
            yield TrainerClass(node, base or "unknown", overrides, family, collects)


def is_told_how_many(function: FunctionNode | ast.Lambda) -> bool:
    """Whether a `get_batch_samples` is the one that the Trainer calls: others of that name sample from a model."""
    return any(argument.arg == "num_batches" for argument in function.args.args)


def _has_own_loop(index: Index) -> bool:
    """Whether the file itself calls training_step for every batch: a Trainer's own source, which is rehearsed as the loop it is."""
    return any(
        isinstance(call, ast.Call) and terminal(call.func) == "training_step" and not _is_super(call)
        for name, functions in (*index.functions.items(), *index.methods.items())
        if name != "training_step"
        for function in functions
        for call in every(function, ast.Call)
    )


def _is_super(call: ast.Call) -> bool:
    return isinstance(call.func, ast.Attribute) and isinstance(call.func.value, ast.Call) and terminal(call.func.value.func) == "super"


def imports(index: Index) -> dict[str, str]:
    """Where the imported names of a file come from, as dotted paths; those of the own project begin with a dot."""
    return index.once("import paths", index.tree, _import_paths)


def _import_paths(tree: ast.AST) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in every(tree, ast.Import, ast.ImportFrom):
        if isinstance(node, ast.Import):
            found.update(
                {each.asname or each.name.split(".")[0]: each.name if each.asname else each.name.split(".")[0] for each in node.names}
            )
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            found.update({each.asname or each.name: f"{module}.{each.name}" for each in node.names})
    return found


def _family(index: Index, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """A class and its bases of the same file, nearest first."""
    pending, seen = [node], {id(node)}
    while pending:
        current = pending.pop(0)
        yield current
        for base in current.bases:
            own = index.classes.get(base.id) if isinstance(base, ast.Name) else None
            if own is not None and id(own) not in seen:
                seen.add(id(own))
                pending.append(own)


def _base(family: Iterable[ast.ClassDef], imported: dict[str, str], index: Index) -> str:
    kinds = {_kind_of(base, imported) for each in family for base in each.bases if terminal(base) not in index.classes}
    return next((kind for kind in ("unknown", "language", "plain") if kind in kinds), "")


def _mixin(node: ast.ClassDef, overrides: dict[str, FunctionNode]) -> str:
    """A class that is made to stand before a Trainer among the bases of another."""
    calls = (part for each in overrides.values() for part in walk(each) if isinstance(part, ast.Call) and _is_super(part))
    known = "Trainer" in node.name and any(terminal(call.func) in OVERRIDES for call in calls)
    return "unknown" if known and all(takes_count(each) for each in overrides.values()) else ""


def _kind_of(base: ast.expr, imported: dict[str, str]) -> str:
    name = terminal(base)
    root: ast.AST = base
    while isinstance(root, ast.Attribute):
        root = root.value
    path = imported.get(root.id, "") if isinstance(root, ast.Name) else ""
    owner = path.split(".")[0]
    real = name if isinstance(base, ast.Attribute) else path.rsplit(".", 1)[-1] or name
    if real in LANGUAGE:
        return "language"
    if real in PLAIN:
        return "plain" if owner in OWNERS or real == "_BaseTrainer" else ""
    return "unknown" if owner in OWNERS and real.endswith("Trainer") else ""


def takes_count(function: FunctionNode, *, by_name: bool = False) -> bool:
    """Whether an override can be handed the count of the window's items: by its name, or among `**kwargs` or `*args`."""
    arguments = function.args
    if any(each.arg == COUNT for each in (*arguments.args, *arguments.kwonlyargs)):
        return True
    return not by_name and (arguments.kwarg is not None or (function.name == "training_step" and _places(function) >= 3))


def _places(function: FunctionNode) -> int:
    """How many arguments a method takes by position, less its own object."""
    return 99 if function.args.vararg is not None else len(function.args.args) - 1


def flag(index: Index, cls: TrainerClass, name: str) -> bool | None:
    """What the source sets a flag of the Trainer to, wherever it sets it; None where it does not, or says both."""
    every = index.once("trainer flags", index.tree, _flags)
    outside = [value for holder, each, value in every if each == name and holder is None]
    own = [value for holder, each, value in every if each == name and holder is not None and any(holder is one for one in cls.family)]
    values = set(own or outside)
    return values.pop() if len(values) == 1 else None


def is_flagged(index: Index, cls: TrainerClass, name: str) -> bool:
    """Whether the source sets a flag to something that is not a plain truth value, or to both."""
    return flag(index, cls, name) is None and any(
        isinstance(part, ast.Attribute) and part.attr == name and isinstance(part.ctx, ast.Store) for part in walk(index.tree)
    )


def _flags(tree: ast.AST) -> list[tuple[ast.ClassDef | None, str, bool]]:
    found: list[tuple[ast.ClassDef | None, str, bool]] = []
    pending: list[tuple[ast.AST, ast.ClassDef | None]] = [(tree, None)]
    while pending:
        node, holder = pending.pop()
        if isinstance(node, ast.ClassDef):
            holder = node
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, bool):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found += [(holder, terminal(target), node.value.value) for target in targets if terminal(target) in FLAGS]
        pending += [(child, holder) for child in ast.iter_child_nodes(node)]
    return found


def is_given_a_loss(cls: TrainerClass) -> bool:
    """Whether a class hands `compute_loss_func` to its base, if only to keep the Trainer from dividing."""
    return any(
        word.arg == "compute_loss_func" and isinstance(word.value, ast.Constant) and bool(word.value.value)
        for each in cls.family
        for part in walk(each)
        if isinstance(part, ast.Call) and terminal(part.func) == "__init__"
        for word in part.keywords
    )


def filled_later(cls: TrainerClass) -> set[str]:
    """The attributes that methods other than __init__ set: what begins as None is there by the time that a loss is computed."""
    methods = (
        each
        for part in cls.family
        for each in part.body
        if isinstance(each, (ast.FunctionDef, ast.AsyncFunctionDef)) and each.name != "__init__"
    )
    return {part.attr for each in methods for part in walk(each) if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store)}


def is_counted(index: Index, cls: TrainerClass) -> bool:
    """Whether the batches surely hold labels, which is what the Trainer counts."""
    if cls.base == "language" or (index.identifiers & COLLATORS and index.once("collators made", index.tree, _makes_collator)):
        return True
    if any(_is_own_loss(part) for each in cls.family for part in walk(each)) and index.once("library model", index.tree, _loads_model):
        return True  # which the model forms of labels only
    batches = {"inputs", "batch"}
    return any(_reads_labels(part, batches) for each in cls.family for part in walk(each)) or index.once(
        "labels made", index.tree, _makes_labels
    )


def uses_count(function: FunctionNode) -> bool:
    """Whether a function reads the count that it is given."""
    return any(isinstance(part, ast.Name) and part.id == COUNT and isinstance(part.ctx, ast.Load) for part in walk(function))


def _is_own_loss(node: ast.AST) -> bool:
    """`outputs.loss`, `outputs["loss"]`, or what `super().compute_loss(…)` gives."""
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "compute_loss" and terminal(node.func.value) == "super"
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == "loss" and isinstance(node.ctx, ast.Load)
    return isinstance(node, ast.Attribute) and node.attr == "loss" and isinstance(node.ctx, ast.Load)


def _loads_model(tree: ast.AST) -> bool:
    """Whether a model of the library is loaded, whose loss is one of labels."""
    return any(
        isinstance(part, ast.Call)
        and isinstance(part.func, ast.Attribute)
        and part.func.attr in {"from_pretrained", "from_config"}
        and LIBRARY_MODEL.search(terminal(part.func.value)) is not None
        for part in walk(tree)
    )


def _makes_collator(tree: ast.AST) -> bool:
    return any(isinstance(part, ast.Call) and terminal(part.func) in COLLATORS for part in walk(tree))


def _reads_labels(node: ast.AST, names: set[str]) -> bool:
    if isinstance(node, ast.Subscript):
        return terminal(node.value) in names and _is_labels(node.slice)
    if isinstance(node, ast.Call) and terminal(node.func) in {"pop", "get"} and isinstance(node.func, ast.Attribute) and node.args:
        return terminal(node.func.value) in names and _is_labels(node.args[0])
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In):
        return _is_labels(node.left) and terminal(node.comparators[0]) in names
    return False


def _is_labels(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == "labels"


def _makes_labels(tree: ast.AST) -> bool:
    """Whether code outside of trainers puts labels into what becomes a batch."""
    skipped = (
        part
        for part in walk(
            tree, lambda node: isinstance(node, ast.ClassDef) and any(getattr(each, "name", "") in OVERRIDES for each in node.body)
        )
    )
    for part in skipped:
        if isinstance(part, ast.Assign) and any(isinstance(target, ast.Subscript) and _is_labels(target.slice) for target in part.targets):
            return True
        if (
            isinstance(part, (ast.Return, ast.Assign))
            and isinstance(part.value, ast.Dict)
            and any(key is not None and _is_labels(key) for key in part.value.keys)
        ):
            return True
    return False


def accepts_count(index: Index, cls: TrainerClass, newest: tuple[int, ...]) -> bool | None:
    """Whether the model's forward takes keywords, among them the count: then the Trainer does not divide. None: not known."""
    if cls.base == "language":
        return True
    if cls.base == "unknown":
        return None
    names = {each.node.name for each in trainer_classes(index)} | PLAIN
    models = [
        given
        for call in walk(index.tree)
        if isinstance(call, ast.Call) and terminal(call.func) in names and (given := _model_given(call)) is not None
    ]
    found = {_Models(index, newest).accepts(model) for model in models}
    if found:
        return found.pop() if len(found) == 1 else None
    words = {part.attr for each in cls.family for part in walk(each) if isinstance(part, ast.Attribute)}
    words |= {part.value for each in cls.family for part in walk(each) if isinstance(part, ast.Constant) and isinstance(part.value, str)}
    return True if words & LANGUAGE_SIGNS else None


def _model_given(call: ast.Call) -> ast.expr | None:
    return next((word.value for word in call.keywords if word.arg == "model"), call.args[0] if call.args else None)


class _Models:
    """Follows the name of a model to where it is made."""

    def __init__(self, index: Index, newest: tuple[int, ...]) -> None:
        self.index = index
        self.newest = newest  # release of the framework
        self.imported = imports(index)
        self.seen: set[str] = set()

    def accepts(self, node: ast.expr) -> bool | None:
        if isinstance(node, ast.Call):
            return self._made_by(node)
        name = terminal(node)
        if not name or name in self.seen:
            return None
        self.seen.add(name)
        given = [value for value in self._assigned(name) if isinstance(value, ast.expr)]
        answers = {self.accepts(value) for value in given if not _keeps(value, name)}
        return answers.pop() if len(answers) == 1 else None

    def _assigned(self, name: str) -> Iterator[ast.expr]:
        for part in walk(self.index.tree):
            if isinstance(part, ast.Assign):
                for target in part.targets:
                    first = target.elts[0] if isinstance(target, ast.Tuple) and target.elts else target
                    if terminal(first) == name and isinstance(first, ast.Name):
                        yield part.value

    def _made_by(self, call: ast.Call) -> bool | None:
        name = terminal(call.func)
        if name in {"from_pretrained", "from_config"} and isinstance(call.func, ast.Attribute):
            return self._class(terminal(call.func.value))
        if name in {"to", "cuda", "half", "bfloat16", "float", "train"} and isinstance(call.func, ast.Attribute):
            return self.accepts(call.func.value)
        if name in {"get_peft_model", "prepare_model_for_kbit_training", "compile"} and call.args:
            return self.accepts(call.args[0])
        functions = [each for each in self.index.functions.get(name, ()) if each not in self.index.owner]
        if functions and name not in self.seen:
            self.seen.add(name)
            returned = [part.value for part in walk(functions[0]) if isinstance(part, ast.Return) and part.value is not None]
            answers = {self.accepts(value.elts[0] if isinstance(value, ast.Tuple) and value.elts else value) for value in returned}
            return answers.pop() if len(answers) == 1 else None
        return self._class(name)

    def _class(self, name: str) -> bool | None:
        own = self.index.classes.get(name)
        if own is not None:
            return self._own(own)
        path = self.imported.get(name, "")
        if path.split(".")[0] == "unsloth" and name == "FastLanguageModel":
            return True
        known = path.split(".")[0] == "transformers" and LIBRARY_MODEL.search(path) is not None
        known = known and (self.newest >= ALL_TAKE_KEYWORDS or TAKES_KEYWORDS.search(path) is not None)
        return True if known and not SEVERAL_INPUTS.search(name) else None

    def _own(self, cls: ast.ClassDef) -> bool | None:
        """Of a model of the file: what its class says, else whether its forward takes keywords."""
        for part in cls.body:
            if isinstance(part, (ast.Assign, ast.AnnAssign)) and isinstance(part.value, ast.Constant):
                targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                if any(terminal(target) == "accepts_loss_kwargs" for target in targets):
                    return bool(part.value.value)
        forward = next((each for each in self.index.class_methods(cls) if each.name == "forward"), None)
        if forward is not None:
            return forward.args.kwarg is not None
        return next((self._class(terminal(base)) for base in cls.bases), None)


def _keeps(value: ast.expr, name: str) -> bool:
    """`model = model.to(device)`: what is assigned is the same model."""
    return isinstance(value, ast.Call) and any(terminal(part) == name for part in walk(value) if isinstance(part, ast.Name))


def accumulates(index: Index) -> bool:
    """Whether K can be above 1: not where the file makes the arguments itself and gives them no K, or 1."""
    return index.once("trainer accumulates", index.tree, _gives_k)


def _gives_k(tree: ast.AST) -> bool:
    calls = [part for part in every(tree, ast.Call) if isinstance(part, ast.Call)]
    made = [part for part in calls if ARGUMENTS.search(terminal(part.func))]
    if not made:
        return True
    parsed = any(isinstance(part, ast.Name) and part.id in {"HfArgumentParser", "TrlParser"} for part in every(tree, ast.Name))
    set_later = any(
        isinstance(part, ast.Attribute) and part.attr == "gradient_accumulation_steps" and isinstance(part.ctx, ast.Store)
        for part in every(tree, ast.Attribute)
    )
    if parsed or set_later:
        return True
    for call in made:
        if any(word.arg is None for word in call.keywords):
            return True
        given = next((word.value for word in call.keywords if word.arg == "gradient_accumulation_steps"), None)
        if given is not None and not (isinstance(given, ast.Constant) and given.value == 1):
            return True
    return False


def averages_tokens(tree: ast.AST) -> bool | None:
    """What the source sets `average_tokens_across_devices` to, or None."""
    name = "average_tokens_across_devices"
    given = [part.value for part in every(tree, ast.keyword) if isinstance(part, ast.keyword) and part.arg == name]
    assigned = (part for part in every(tree, ast.Assign) if isinstance(part, ast.Assign))
    given += [part.value for part in assigned if any(terminal(each) == name for each in part.targets)]
    values = {each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, bool)}
    return values.pop() if len(values) == 1 else None


def loss_functions(index: Index) -> Iterator[FunctionNode]:
    """The functions that are given to a Trainer as its loss: `Trainer(…, compute_loss_func=f)`, and what its newer releases can call."""
    seen: set[int] = set()
    for call in every(index.tree, ast.Call):
        if not (isinstance(call, ast.Call) and terminal(call.func).endswith("Trainer")):
            continue
        for word in call.keywords:
            if word.arg == "compute_loss_func":
                for function in _functions_of(index, word.value):
                    if id(function) not in seen and takes_count(function):
                        seen.add(id(function))
                        yield function


def _functions_of(index: Index, given: ast.expr) -> Iterator[FunctionNode]:
    """A function by its name, in a `partial`, as a lambda, a method, or an object that is called."""
    if isinstance(given, ast.Call) and terminal(given.func) == "partial" and given.args:
        yield from _functions_of(index, given.args[0])
    elif isinstance(given, ast.Call) and terminal(given.func) in index.classes:
        yield from _called(index, index.classes[terminal(given.func)])
    elif isinstance(given, ast.Lambda):
        yield index.once("lambda", given, _as_function)
    elif isinstance(given, (ast.Name, ast.Attribute)):
        name = terminal(given)
        functions = [*index.functions.get(name, ()), *(index.methods.get(name, ()) if isinstance(given, ast.Attribute) else ())]
        yield from functions
        if not functions:
            for part in walk(index.tree):
                if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call) and any(terminal(one) == name for one in part.targets):
                    yield from _functions_of(index, part.value)


def _called(index: Index, cls: ast.ClassDef) -> Iterator[FunctionNode]:
    """What runs when an object of a class is called."""
    own = {member.name: member for member in index.class_methods(cls)}
    found = own.get("__call__") or own.get("forward")
    if found is not None:
        yield found


def _as_function(node: ast.AST) -> ast.FunctionDef:
    assert isinstance(node, ast.Lambda)
    body = ast.copy_location(ast.Return(node.body), node.body)
    made = ast.FunctionDef("compute_loss_func", node.args, [body], [])
    return ast.copy_location(made, node)
