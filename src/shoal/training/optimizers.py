"""Optimizers of torch by name, and their state: per node, stacked, and as arrays for checkpoints."""

from __future__ import annotations

import copy
import functools
import inspect
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from types import CodeType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from shoal.errors import ExperimentError
from shoal.plugins import load_class
from shoal.schema import nearest
from shoal.state import State
from shoal.training.settings import Training
from shoal.training.torch_names import OPTIMIZER_OPTIONS
from shoal.traits import TrainingView

if TYPE_CHECKING:
    import torch

ELEMENTWISE = frozenset(
    ["SGD", "Adam", "AdamW", "Adamax", "NAdam", "RAdam", "RMSprop", "Adagrad", "Adadelta", "ASGD", "Rprop"]
)
"""Optimizers of torch that update every element independently of all others."""

UNSUPPORTED = frozenset({"Optimizer", "LBFGS", "SparseAdam", "Muon"})
"""Classes of torch.optim that need a closure, sparse gradients, or matrices only."""

COMPILER = "torch._dynamo"
EXCLUDED = "__dynamo_disable"
"""The attribute with which torch marks a function that it has excluded from compilation."""

IN_GROUP = "group."
"""The prefix of entries of a state that belong to the parameter group of the optimizer."""

OptimizerState: TypeAlias = dict[str, Any]
"""The state of an optimizer for one node. With one tensor: its entries. With several: the entries of each by index."""


class OptimizerFactory:
    """Creates the optimizer that `training` names."""

    def __init__(self, training: Training) -> None:
        """Raises ExperimentError that names the key of an unknown optimizer or option."""
        self._class, self._options = _find(training)
        declared = getattr(self._class, "elementwise", False) is True
        self.elementwise = declared if ":" in training.optimizer else self._class.__name__ in ELEMENTWISE
        """Whether it may work on the flat vector in place of the module's tensors, and on a stack of vectors."""

    def create(self, tensors: list[torch.Tensor]) -> torch.optim.Optimizer:
        with _compiler_not_imported():
            optimizer: torch.optim.Optimizer = self._class(tensors, **self._options)
        return optimizer


def check_optimizer(training: TrainingView) -> None:
    """Raise ExperimentError that names the key of an unknown optimizer or option.

    torch is imported only for plug-ins, and for names that are not known without it.
    """
    known = OPTIMIZER_OPTIONS.get(training.optimizer.lower(), frozenset())
    given = {key for key in ("momentum", "nesterov", "weight_decay") if getattr(training, key)}
    if not known or not known >= given | training.options.keys():
        _find(training)


def _find(training: TrainingView) -> tuple[Any, dict[str, Any]]:
    """Return the class of the optimizer and its arguments."""
    cls = _find_class(training.optimizer)
    known = inspect.signature(cls).parameters
    wanted = {"momentum": training.momentum, "nesterov": training.nesterov, "weight_decay": training.weight_decay}
    options: dict[str, Any] = {"lr": training.lr, **{k: v for k, v in wanted.items() if v}}
    if training.weight_decay == 0.0 and "weight_decay" in known:
        options["weight_decay"] = 0.0  # given explicitly, and the optimizer's default may differ
    if "foreach" in known:
        options["foreach"] = False  # no gain for one tensor, and it would import more of torch
    problems = [f"training.{key}: {cls.__name__} has no such option" for key in options if key not in known]
    for key, value in training.options.items():
        if key not in known:
            problems.append(f"training.options.{key}: {cls.__name__} has no such option{nearest(key, known)}")
        options[key] = tuple(value) if isinstance(value, list) else value
    if problems:
        raise ExperimentError(problems)
    return cls, options


def _find_class(name: str) -> Any:
    """Return the class of torch.optim of this name, or the class of a plug-in."""
    import torch

    if ":" in name:
        try:
            found = load_class(name)
        except ValueError as error:
            raise ExperimentError([f"training.optimizer = {name!r}: {error}"]) from error
        if not issubclass(found, torch.optim.Optimizer):
            raise ExperimentError([f"training.optimizer = {name!r}: expected a subclass of torch.optim.Optimizer"])
        if found.step is torch.optim.Optimizer.step:
            raise ExperimentError(
                [
                    f"training.optimizer = {name!r}: {found.__name__} has no method 'def step(self, closure=None)' "
                    "(torch.optim.Optimizer); add it"
                ]
            )
        return found
    classes = {
        n.lower(): found
        for n, found in vars(torch.optim).items()
        if isinstance(found, type) and issubclass(found, torch.optim.Optimizer) and n not in UNSUPPORTED
    }
    if name.lower() not in classes:
        raise ExperimentError([f"training.optimizer = {name!r}: unknown{nearest(name.lower(), classes)}"])
    return classes[name.lower()]


def set_rate(optimizer: torch.optim.Optimizer, rates: Sequence[float] | None, step: int) -> None:
    """Set the learning rate of this step; None leaves it as it is."""
    if rates is not None:
        for group in optimizer.param_groups:
            group["lr"] = rates[step]


def take_step(optimizer: torch.optim.Optimizer) -> None:
    """Call `optimizer.step()`, without the profiling and the hooks that torch adds to it, unless there are hooks.

    For its profiler, torch registers an object in a hash table in each step, at a place that depends on the object's
    address. In a forked process, each of these writes may make another page of memory private. Around the step, torch
    imports its compiler to end a compiled graph, and there is none: see `_compiler_not_imported`.
    """
    import torch
    from torch.optim import optimizer as module

    hooks = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    every = module._global_optimizer_pre_hooks, module._global_optimizer_post_hooks
    step = type(optimizer).step
    if getattr(step, "hooked", False) and not any(hooks) and not any(every):
        step = step.__wrapped__  # type: ignore[attr-defined]
    wrapper = _grad_mode_wrapper()
    if wrapper is not None and getattr(step, "__code__", None) is wrapper and COMPILER not in sys.modules:
        with torch.set_grad_enabled(optimizer.defaults["differentiable"]):
            step.__wrapped__(optimizer)  # type: ignore[attr-defined]
    else:
        step(optimizer)


@functools.cache
def _grad_mode_wrapper() -> CodeType | None:
    """The code of the function that torch wraps around the steps of its optimizers, to set the gradient mode.

    None if this version of torch has no such function.
    """
    from torch.optim import optimizer as module

    wrap = getattr(module, "_use_grad_for_differentiable", None)
    return None if wrap is None else wrap(lambda optimizer: None).__code__


@contextmanager
def _compiler_not_imported() -> Iterator[None]:
    """Let optimizers be created without torch's compiler, whose import takes as long as that of the rest of torch.

    torch imports it at the first use of a function that it excludes from compilation, and stores the result in an
    attribute of the function. Here the attribute is the function itself, for the time in which nothing is compiled.
    """
    import torch

    function = getattr(torch.optim.Optimizer.add_param_group, "__wrapped__", None)
    if function is None or COMPILER in sys.modules or hasattr(function, EXCLUDED):
        yield
        return
    setattr(function, EXCLUDED, function)
    try:
        yield
    finally:
        delattr(function, EXCLUDED)


# State


def load_state(optimizer: torch.optim.Optimizer, state: OptimizerState) -> None:
    """Make `optimizer` continue from `state`, as `read_state` returned it."""
    group = optimizer.param_groups[0]
    tensors = group["params"]
    for key in _changed_in_group(optimizer):  # by another node
        del group[key]
    own = {key.removeprefix(IN_GROUP): value for key, value in state.items() if key.startswith(IN_GROUP)}
    group.update({**{key: value for key, value in optimizer.defaults.items() if key not in group}, **own})
    state = {key: value for key, value in state.items() if not key.startswith(IN_GROUP)} if own else state
    per_tensor = [state] if len(tensors) == 1 else [state.get(str(i), {}) for i in range(len(tensors))]
    optimizer.state = defaultdict(dict, zip(tensors, (dict(s) for s in per_tensor), strict=True))


def read_state(optimizer: torch.optim.Optimizer) -> OptimizerState:
    group = optimizer.param_groups[0]
    tensors = group["params"]
    changed = {f"{IN_GROUP}{key}": group[key] for key in _changed_in_group(optimizer)}
    if len(tensors) == 1:
        return {**optimizer.state[tensors[0]], **changed}
    return {**{str(i): dict(optimizer.state[t]) for i, t in enumerate(tensors)}, **changed}


def _changed_in_group(optimizer: torch.optim.Optimizer) -> list[str]:
    """Return the entries of the parameter group that a plug-in has set in its steps, other than the learning rate."""
    defaults = optimizer.defaults
    group = optimizer.param_groups[0]
    return [k for k, v in group.items() if k not in ("params", "lr") and (k not in defaults or v is not defaults[k])]


def state_signature(state: OptimizerState) -> Hashable:
    """Return a value that is equal for states that can be stacked: the same entries after equally many steps."""
    from torch.utils._pytree import tree_flatten

    if not state:
        return ()
    entries, structure = tree_flatten(state)
    return repr(structure), tuple(_number_or_text(entry) if _is_step_count(entry) else None for entry in entries)


def _number_or_text(value: Any) -> float | str:
    return float(value) if hasattr(value, "ndim") or isinstance(value, int | float) else repr(value)


def stack_states(states: Sequence[OptimizerState]) -> OptimizerState:
    """Return the state of one optimizer on stacked parameters; `states` have equal signatures.

    Tensors in lists and tables of a plug-in are stacked, too. The result shares nothing with `states`.
    """
    import torch
    from torch.utils._pytree import tree_map

    def stack(*entries: Any) -> Any:
        return _copy(entries[0]) if _is_step_count(entries[0]) else torch.stack(entries)

    stacked: OptimizerState = tree_map(stack, *states)
    return stacked


def unstack_state(state: OptimizerState, count: int) -> list[OptimizerState]:
    """Return the states of the `count` nodes whose parameters were stacked."""
    from torch.utils._pytree import tree_map

    def row(node: int) -> OptimizerState:
        own: OptimizerState = tree_map(lambda entry: _copy(entry) if _is_step_count(entry) else entry[node], state)
        return own

    return [row(node) for node in range(count)] if state else [{} for _ in range(count)]


def _is_step_count(value: Any) -> bool:
    """Whether an entry of a state is a number that all elements share, such as the step counter.

    The optimizers of torch have tensors; plug-ins may have plain numbers.
    """
    return getattr(value, "ndim", 0) == 0


def _copy(value: Any) -> Any:
    return value.clone() if hasattr(value, "clone") else copy.deepcopy(value)


def tensors_to_arrays(state: OptimizerState) -> State:
    """Return a state with NumPy arrays in place of tensors, also in lists, tuples and dictionaries.

    They are copies: the optimizer writes into its own.
    """

    def array(value: Any, key: Any) -> Any:
        if isinstance(value, np.generic):
            return value.item()  # an array would become a tensor
        return value.detach().cpu().numpy().copy() if hasattr(value, "cpu") else value

    arrays: State = _map_entries(state, array)
    return arrays


def arrays_to_tensors(state: State, device: torch.device) -> OptimizerState:
    """Undo `tensors_to_arrays`. Step counters stay on the CPU, where torch keeps them."""
    import torch

    def tensor(value: Any, key: Any) -> Any:
        if not isinstance(value, np.ndarray):
            return value
        return torch.tensor(value, device=torch.device("cpu") if key == "step" else device)

    tensors: OptimizerState = _map_entries(state, tensor)
    return tensors


def _map_entries(value: Any, change: Callable[[Any, Any], Any], key: Any = None) -> Any:
    """Return a state with every entry changed. `change` gets the entry, and the key of the dictionary that it is in."""
    if isinstance(value, dict):
        return {key: _map_entries(inner, change, key) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        items = [_map_entries(inner, change, key) for inner in value]
        return tuple(items) if isinstance(value, tuple) else items
    return change(value, key)
