"""torch: the objects of a training loop and where they come from (modules, optimizers, schedulers, loaders, criteria)."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import TYPE_CHECKING

from accumlint.source.reading.counting import bounds_in_micro_batches, counts_batches, total_of, totals_in
from accumlint.source.reading.facts import LOSS_WORDS, terminal
from accumlint.source.reading.nodes import walk
from accumlint.source.reading.units import Units
from accumlint.source.reading.words import found_in
from accumlint.source.rehearsal.holding import has_unknown_base
from accumlint.source.rehearsal.lengths import in_micro_batches as counts_micro_batches
from accumlint.source.rehearsal.unclear import is_accumulation, is_told
from accumlint.source.rehearsal.values import (
    FALSE,
    NONE,
    TRUE,
    Class,
    Function,
    Instance,
    Items,
    Key,
    Known,
    Mapping,
    Opaque,
    Partial,
    Root,
    Stream,
    Thing,
    Value,
    actor_of,
    fresh_uid,
    make_actor,
    setting_keys,
)
from accumlint.source.vocabulary.base import Attribute, Handler, as_actor, parameters_owner, raw_module, receiver_of, role_of
from accumlint.trace import Actor, Kind, Role
from accumlint.weight import Quantity

if TYPE_CHECKING:
    from accumlint.source.rehearsal.machine import Machine
    from accumlint.source.rehearsal.state import Call

OPTIMIZER_CLASS = re.compile(
    r"^(Fused|Distributed|Hybrid|CPU|Scaled|Dist)?(SGD\w*|Adam\w*|RAdam|NAdam|RMSprop|Adagrad|Adadelta|Rprop|ASGD|LBFGS|SparseAdam|Lamb|LAMB|Lion|LARS|Adafactor"
    r"|Muon\w*|Ranger\w*|NovoGrad|Novograd|Sophia\w*|Shampoo|BertAdam|OpenAIAdam|Prodigy|AdEMAMix|ZeroRedundancyOptimizer)$"
)
SCHEDULER_CLASS = re.compile(
    r"(LR|Scheduler|Schedule)$|Plateau|Warmup|Annealing|^get_\w*schedule\w*$|^(CosineAnnealingWarmRestarts|ReduceLROnPlateau|SequentialLR)$"
)
makes_optimizer, makes_scheduler = found_in(OPTIMIZER_CLASS), found_in(SCHEDULER_CLASS)
CRITERIA = {
    "CrossEntropyLoss": "cross_entropy",
    "NLLLoss": "nll_loss",
    "MSELoss": "mse_loss",
    "L1Loss": "l1_loss",
    "SmoothL1Loss": "smooth_l1_loss",
    "HuberLoss": "huber_loss",
    "BCELoss": "binary_cross_entropy",
    "BCEWithLogitsLoss": "binary_cross_entropy_with_logits",
    "KLDivLoss": "kl_div",
    "CTCLoss": "ctc_loss",
    "PoissonNLLLoss": "poisson_nll_loss",
    "MarginRankingLoss": "margin_ranking_loss",
    "TripletMarginLoss": "triplet_margin_loss",
    "CosineEmbeddingLoss": "cosine_embedding_loss",
    "MultiMarginLoss": "multi_margin_loss",
    "SoftMarginLoss": "soft_margin_loss",
    "GaussianNLLLoss": "gaussian_nll_loss",
    "MultiLabelSoftMarginLoss": "multilabel_soft_margin_loss",
    "HingeEmbeddingLoss": "hinge_embedding_loss",
    "MultiLabelMarginLoss": "multilabel_margin_loss",
}
MODULE = frozenset({"torch.nn.Module", "nn.Module", "Module"})
MODULE_BASES = re.compile(r"(^|\.)(Module|PreTrainedModel|\w*PreTrainedModel|ModelMixin|LightningModule|Sequential|ModuleList)$")


def optimizer(state: Machine, call: Call) -> Value | None:
    """`torch.optim.X(parameters, …)`."""
    first = call.argument(0, "params")
    owner = parameters_owner(state.force(first)) if first is not None else None
    if isinstance(first, Items) and owner is None:
        owners = [found for found in (_group_owner(state, item) for item in first.items) if found is not None]
        owner = owners[0] if len({id(raw_module(state.force(one))) for one in owners}) == 1 else None  # it may hold several models
    rate = state.force(call.argument(1, "lr") or NONE)
    if isinstance(rate, Opaque) and rate.weight is not None and rate.weight.power(Quantity.ACCUMULATION) < 0:
        state.recorder.fact("sum-convention", call.node)  # the rate is divided by K, in the place of the losses
    return new_optimizer(state, call.name, owner)


def _group_owner(state: Machine, item: Value) -> Value | None:
    item = state.force(item)
    if isinstance(item, Mapping) and "params" in item.items:
        return parameters_owner(state.force(item.items["params"]))
    return parameters_owner(item)


def new_optimizer(state: Machine, name: str, owner: Value | None) -> Thing:
    base = None
    if owner is not None:
        module = raw_module(owner)
        as_actor(state, module, Role.MODEL)
        actor = actor_of(module)
        base = actor.uid if actor is not None else None
        if isinstance(module, Opaque) and module.owner is not None and role_of(state, state.force(module.owner)) is Role.MODEL:
            as_actor(state, state.force(module.owner), Role.MODEL)
            state.adopt(raw_module(state.force(module.owner)) or module, module)  # `model.head.parameters()`, of a model not followed
    made = Thing(Actor(fresh_uid(), name, Role.OPTIMIZER, base=base, known=True), inner=owner)
    state.optimizers.append(made)
    return made


def scheduler(state: Machine, call: Call) -> Value | None:
    """A scheduler, with the unit that its total is visibly counted in."""
    roots: set[Root] = set()
    for value in call.values:
        roots |= _roots_in(state, value)
    in_updates = any(root.key in state.world.knowledge.accumulations for root in roots)
    in_micro_batches = (any(root.kind == "length" for root in roots) and not in_updates) or any(map(_is_product_with_k, call.values))
    in_micro_batches |= not in_updates and any(counts_micro_batches(state, state.force(value)) for value in call.values)
    origin = _in_more_than_updates(state, call)
    in_micro_batches |= origin is not None
    options = {name for name, holds in (("horizon-in-updates", in_updates), ("horizon-in-micro-batches", in_micro_batches)) if holds}
    if not call.path.startswith("torch.") and any(is_accumulation(state, value) for value in call.values):
        options.add("gated")  # it was told of K itself, so that it may count by itself
    actor = Actor(fresh_uid(), call.name, Role.SCHEDULER, known=True, options=frozenset(options))
    if origin is not None:
        state.recorder.fact(f"horizon-in-micro-batches:{actor.uid}", origin)
    state.memory["horizon", actor.uid] = frozenset().union(*(_keys_in(state, value) for value in call.values))
    return Thing(actor, inner=state.force(call.args[0]) if call.args else None)


def _keys_in(state: Machine, value: Value) -> frozenset[Key]:
    """What a number is known by, or those that a function of the schedule's reads from around it."""
    value = state.force(value)
    if not isinstance(value, Function) or getattr(value.closure, "parent", None) is None:
        return setting_keys(value)
    read = [state.force(one) for one in list(getattr(value.closure, "names", {}).values())]
    return frozenset().union(*(setting_keys(one) for one in read if isinstance(one, (Known, Opaque))))


def _is_product_with_k(value: Value) -> bool:
    """`max_updates * K`: a total in micro-batches."""
    return isinstance(value, Opaque) and value.weight is not None and value.weight.power(Quantity.ACCUMULATION) > 0


def _in_more_than_updates(state: Machine, call: Call) -> ast.expr | None:
    """Where the total of a schedule is seen to be counted in other units than updates: what it is made of."""
    total = total_of(call.node)
    totals = [total] if total is not None else state.index.once("totals", call.node, lambda _: [*totals_in(state.index, call.node)])
    if not totals:
        return None
    names = {root.text.rsplit(".", 1)[-1] for root in state.world.knowledge.accumulations.values()}
    known = state.index.once("units", state.index.tree, Units)
    units = known.asking(lambda name: name in names or state.world.knowledge.is_accumulation_name(name))
    bounds = bounds_in_micro_batches(state.index)
    degrees = {units.degree(each, lambda node: counts_batches(node) or _is_bound(node, bounds)) for each in totals} - {None}
    degree = degrees.pop() if len(degrees) == 1 else None
    return units.origin(totals[0]) if degree is not None and degree >= 0 else None


def _is_bound(node: ast.expr, bounds: frozenset[str]) -> bool:
    return isinstance(node, (ast.Name, ast.Attribute)) and terminal(node) in bounds


def _roots_in(state: Machine, value: Value, depth: int = 0) -> set[Root]:
    """The open numbers that went into an argument, also through the closure of a function."""
    value = state.force(value)
    if isinstance(value, Known):
        return set(value.roots)
    if isinstance(value, Items) and depth < 3:
        return {root for item in value.items for root in _roots_in(state, item, depth + 1)}
    if isinstance(value, Function) and depth < 3:
        names = getattr(value.closure, "names", {}) if getattr(value.closure, "parent", None) is not None else {}
        return {root for one in list(names.values()) if isinstance(one, Known) for root in one.roots}
    return set()


def criterion(state: Machine, call: Call) -> Value | None:
    """A criterion is its function with the settings already given."""
    name = call.name if call.name in CRITERIA else call.path.rsplit(".", 1)[-1]
    function = state.opaque(("import", CRITERIA[name]), name, path=f"torch.nn.functional.{CRITERIA[name]}", name=CRITERIA[name])
    return Partial(
        function, (), {key: value for key, value in call.keywords.items() if key in {"reduction", "ignore_index", "size_average", "reduce"}}
    )


def module(state: Machine, call: Call) -> Value | None:
    """`nn.Linear(…)` and the like; modules among the arguments become its parts."""
    made = Thing(make_actor(Role.MODEL, call.name))
    for value in call.args:
        value = state.force(value)
        for part in value.items if isinstance(value, Items) else [value]:
            state.adopt(made, state.force(part))
    return made


def data_loader(state: Machine, call: Call) -> Value | None:
    made = Thing(make_actor(Role.LOADER, "loader"), inner=state.force(call.args[0]) if call.args else call.keywords.get("dataset"))
    shuffle = state.force(call.keywords["shuffle"]) if "shuffle" in call.keywords else NONE
    if "sampler" in call.keywords or "batch_sampler" in call.keywords or not (isinstance(shuffle, Known) and not shuffle.value):
        made.actor = replace(made.actor, options=frozenset({"shuffled"}))
    made.length = Root(("loader", call.node.lineno, call.node.col_offset), "len(loader)", "length")
    samplers = (state.force(call.keywords[name]) for name in ("sampler", "batch_sampler") if name in call.keywords)
    if any(isinstance(sampler, Opaque) and is_told(state, sampler.key) for sampler in samplers):
        state.world.knowledge.learn_divisible(made.length)
    return made


def pretrained(state: Machine, call: Call) -> Value | None:
    """`Tagger.from_pretrained(path)` of a class of the source: one of its objects."""
    owner = receiver_of(call)
    made = state.begun(owner, call.node) if isinstance(owner, Class) else None
    return made if isinstance(made, Instance) and actor_of(made) is not None else None


def taken(state: Machine, call: Call) -> Value | None:
    """The forward of a model of the source; a `from_pretrained` that a class of it brings itself: long, and it gives one of its objects."""
    function = call.function
    if isinstance(function, Function) and function.name == "forward" and not state.index.kinds(function.node) & {Kind.BACKWARD, Kind.STEP}:
        caller = state.frame.function.bound if state.frame.function is not None else None  # a trainer may have a helper of that name
        return _called(state, call, function.bound) if isinstance(function.bound, Instance) and function.bound is not caller else None
    if not isinstance(function, Function) or function.name != "from_pretrained" or not isinstance(function.bound, Class):
        return None
    made = state.begun(function.bound, call.node)
    return made if isinstance(made, Instance) and actor_of(made) is not None else None


def forward(state: Machine, call: Call) -> Value | None:
    """`model.forward(x)`."""
    owner = state.force(receiver_of(call) or NONE)
    return None if isinstance(owner, Opaque) and owner.name == "super" else _called(state, call, owner)


def _called(state: Machine, call: Call, model: Value) -> Value | None:
    """What calling a model brings about, but for its hooks; a part of a forward that runs is none of its own."""
    return state.forward_of(call, model) if state.forward is None and role_of(state, model) is Role.MODEL else None


def unwrapped(state: Machine, call: Call) -> Value | None:
    """`torch.compile(model)`, `DataParallel(model)`: the same module."""
    return state.force(call.args[0]) if call.args else None


def construct(state: Machine, cls: Class, call: Call) -> Value | None:
    """A class of the source that derives from a module or an optimizer."""
    names = [base.path or base.text for base in cls.ancestry() if isinstance(base, Opaque)]
    if any(name.rsplit(".", 1)[-1].endswith("Optimizer") or OPTIMIZER_CLASS.match(name.rsplit(".", 1)[-1]) for name in names):
        return _of_unknown_descent(state, cls, call, optimizer(state, call))
    if any(SCHEDULER_CLASS.search(name.rsplit(".", 1)[-1]) for name in names):
        return scheduler(state, call)
    bases = (
        base.node.name if isinstance(base, Class) else base.path or base.text
        for base in cls.ancestry()
        if isinstance(base, (Class, Opaque))
    )
    if LOSS_WORDS.search(cls.node.name) and not any("pretrained" in name.lower() for name in bases):
        return Instance(cls)
    if state.index.once("only computes", cls.node, lambda _: _only_computes(cls)):
        return Instance(cls)  # a criterion by another name
    forward = cls.find("forward")
    if any(MODULE_BASES.search(name) for name in names) or (isinstance(forward, Function) and names):
        instance = Instance(cls)
        instance.actor = make_actor(Role.MODEL, cls.node.name)
        return instance
    return None


def _of_unknown_descent(state: Machine, cls: Class, call: Call, made: Value | None) -> Value | None:
    """An optimizer with a base class that is not there may clear in its step, and count by itself where it is told of K."""
    mixed = len(cls.bases) > 1 and has_unknown_base(state, cls)
    if mixed and isinstance(made, Thing):
        made.actor = replace(made.actor, known=False)
        if any(is_accumulation(state, value) for value in call.values):
            state.elsewhere.told.add(made.actor.uid)
    return made


def _only_computes(cls: Class) -> bool:
    """Whether a module has nothing to train: it compares two things by functions, its own methods and torch's criteria alone."""
    others = [base for base in cls.ancestry() if not isinstance(base, Class)]
    if not others or any(not isinstance(base, Opaque) or (base.path or base.text) not in MODULE for base in others):
        return False
    nodes = [cls.node, *(base.node for base in cls.ancestry() if isinstance(base, Class))]
    methods = {part.name: part for node in reversed(nodes) for part in node.body if isinstance(part, ast.FunctionDef)}
    forward = methods.get("forward")
    if forward is None or len(forward.args.args) - len(forward.args.defaults) < 3:
        return False
    criteria = {
        terminal(target)
        for method in methods.values()
        for part in walk(method)
        if isinstance(part, ast.Assign) and isinstance(part.value, ast.Call) and terminal(part.value.func) in CRITERIA
        for target in part.targets
    }
    return not any(_may_train(part, {*methods, *criteria}) for method in methods.values() for part in walk(method))


def _may_train(part: ast.AST, own: set[str]) -> bool:
    """Whether something is called or gone over that may be a layer, or a parameter is made."""
    if isinstance(part, (ast.For, ast.comprehension)):
        return any(isinstance(each, ast.Name) and each.id == "self" for each in walk(part.iter))
    if not isinstance(part, ast.Call):
        return False
    if terminal(part.func) in {"Parameter", "register_parameter"}:
        return True
    if isinstance(part.func, ast.Attribute):
        return isinstance(part.func.value, ast.Name) and part.func.value.id == "self" and part.func.attr not in {*own, "register_buffer"}
    return isinstance(part.func, ast.Subscript)


def fallback(state: Machine, call: Call) -> Value | None:
    """Constructors that are known by the form of their names."""
    if call.receiver is not None and not call.path:
        return None
    name = call.path.rsplit(".", 1)[-1] if call.path else call.name
    if name in CRITERIA:
        return criterion(state, call)
    if makes_optimizer(name) or (
        call.path.startswith("torch.optim.") and name[:1].isupper() and "scheduler" not in call.path and name != "Optimizer"
    ):
        return optimizer(state, call)
    if makes_scheduler(name) and (call.args or call.keywords) and not state.index.is_own_name(name):
        return scheduler(state, call)
    if call.path.startswith("torch.nn.") and name[:1].isupper() and "utils" not in call.path and name not in {"Parameter", "ParameterList"}:
        return module(state, call)
    return None


def parameters(state: Machine, call: Call) -> Value | None:
    """`model.parameters()`: names the model's gradients."""
    owner = receiver_of(call)
    if owner is None or isinstance(owner, Items):
        return None
    if role_of(state, owner) is not Role.MODEL and not (isinstance(owner, Opaque) and not owner.forwards):
        return None
    as_actor(state, owner, Role.MODEL)
    _adopt_given(state, call.node.func, owner)
    return Stream("parameters", (owner,), text=state.recorder.text(call.node))


def _adopt_given(state: Machine, function: ast.expr, given: Value) -> None:
    """`model.get_input_embeddings().parameters()`: what a model's method gives is part of the model."""
    getter = function.value.func if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Call) else None
    if (
        not isinstance(getter, ast.Attribute)
        or not getter.attr.startswith("get_")
        or not isinstance(getter.value, (ast.Name, ast.Attribute))
    ):
        return
    whole = state.force(state.eval(getter.value))
    if role_of(state, whole) is Role.MODEL and as_actor(state, whole, Role.MODEL) is not None:
        state.adopt(whole, given)


def same_object(state: Machine, call: Call) -> Value | None:
    """`model.to(device)`, `model.train()`: the same object, when it is one that takes part."""
    owner = receiver_of(call)
    if isinstance(owner, (Thing, Instance, Partial, Stream)):
        if isinstance(owner, Instance) and owner.cls.find(call.name) is not None:
            return None
        return owner
    if isinstance(owner, Opaque) and call.name in {"train", "eval", "cuda", "to", "half", "cpu"} and role_of(state, owner) is Role.MODEL:
        return owner
    return None


def requires_grad(state: Machine, call: Call) -> Value | None:
    """`model.requires_grad_(flag)`, `p.requires_grad_(flag)`."""
    owner = receiver_of(call)
    flag = state.force(call.args[0]) if call.args else Known(True)
    if isinstance(flag, Known):
        inner = (parameters_owner(owner.owner) or owner) if isinstance(owner, Opaque) else owner
        if inner is not None and (role_of(state, state.force(inner)) is Role.MODEL):
            state.freeze(state.force(inner), not flag.value)
    return owner


def nothing(state: Machine, call: Call) -> Value | None:
    owner = receiver_of(call)
    return NONE if isinstance(owner, (Thing, Opaque)) and role_of(state, owner) is not None else None


def training_mode(state: Machine, owner: Value) -> Value | None:
    """`model.training`: a loop that goes backward has its models in that mode, and what takes no gradient has not."""
    actor = actor_of(owner)
    if not isinstance(owner, (Instance, Thing)) or actor is None or actor.role is not Role.MODEL:
        return None
    return FALSE if state.no_grad else TRUE


def filtered(state: Machine, call: Call) -> Value | None:
    """`filter(lambda p: p.requires_grad, model.parameters())`: the same parameters."""
    found = state.force(call.args[1]) if len(call.args) > 1 else None
    return found if isinstance(found, Stream) else None


def checkpointed(state: Machine, call: Call) -> Value | None:
    """`checkpoint(function, *inputs)`: calls the function, and again in the backward."""
    if not call.path.endswith(("checkpoint.checkpoint", "checkpointing.checkpoint")) or not call.args:
        return None
    known = {"use_reentrant", "preserve_rng_state", "context_fn", "determinism_check", "debug", "early_stop"}
    return state.call_value(
        call.args[0], call.args[1:], call.node, {name: value for name, value in call.keywords.items() if name not in known}
    )


def takes_gradient(state: Machine, owner: Value) -> Value | None:
    """`p.requires_grad` in a loop over parameters: those that train are met there."""
    return TRUE if isinstance(owner, Opaque) and owner.key[0] == "parameter" else None


FUNCTIONS: dict[str, Handler] = {
    "DataLoader": data_loader,
    "compile": unwrapped,
    "DataParallel": unwrapped,
    "convert_sync_batchnorm": unwrapped,
    "SyncBatchNorm": module,
    "filter": filtered,
    "checkpoint": checkpointed,
}
METHODS: dict[str, Handler] = {
    "forward": forward,
    "parameters": parameters,
    "named_parameters": parameters,
    "master_params": parameters,
    "to": same_object,
    "cuda": same_object,
    "cpu": same_object,
    "train": same_object,
    "eval": same_object,
    "half": same_object,
    "bfloat16": same_object,
    "float": same_object,
    "double": same_object,
    "apply": same_object,
    "requires_grad_": requires_grad,
    "load_state_dict": nothing,
    "from_pretrained": pretrained,
}
ATTRIBUTES: dict[str, Attribute] = {"training": training_mode, "requires_grad": takes_gradient}
