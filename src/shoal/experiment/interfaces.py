"""The interfaces of components: the members that an instance of each kind must have, checked before a run starts."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Mapping, Sequence

from shoal.plugins import is_module_class

INTERFACES: dict[str, tuple[str, ...]] = {
    "algorithm": ("shoal.algorithms:Algorithm",),
    "server-optimizer": ("shoal.algorithms.support.server_optimizers:ServerOptimizer",),
    "sharing": ("shoal.sharing.sharing:Sharing",),
    "topology": ("shoal.topologies.graph:Topology",),
    "dataset": ("shoal.data.dataset:Dataset",),
    "partition": ("shoal.data.dataset:Partition", "shoal.data.dataset:OwnerPartition"),
    "augmentation": ("shoal.data.dataset:Augmentation", "shoal.data.dataset:Rescaling"),
    "model": ("shoal.models.model:Model", "shoal.models.model:DataDependentModel"),
    "network": ("shoal.environment.network.network:Network",),
    "speed": ("shoal.environment.devices:Device",),
    "availability": ("shoal.environment.availability:Availability",),
    "trainer": ("shoal.training.factory:TrainerBackend",),
    "schedule": ("shoal.training.schedules:Schedule",),
    "mapping": ("shoal.experiment.mapping:NodeMapping",),
    "compressor": ("shoal.compression.compressors:Compressor",),
    "values": ("shoal.compression.floats:FloatCodec",),
    "indices": ("shoal.compression.indices:IndexCodec",),
}
"""The protocols of each kind of component, as `module:name`. A component has all members of one of them."""
TRAINER_FACTORY = ("shoal.training.factory:TrainerFactory",)
TRAINER = ("shoal.training.trainer:Trainer",)
"""The protocols of the objects that a trainer's backend creates."""


def missing_members(instance: object, protocols: Sequence[str]) -> str | None:
    """Return what an instance lacks, with signatures, to have all members of one of `protocols`; None if it has them.

    A model that is a `torch.nn.Module` needs no other members.
    """
    if protocols == INTERFACES["model"] and is_module_class(type(instance)):
        return None
    return _reported(type(instance), {path: _lacks(instance, _load(path)) for path in protocols})


def missing_methods(cls: type, protocols: Sequence[str]) -> str | None:
    """Return the same for a class that has no method of any of `protocols`; None for all other classes.

    Such a class is of another kind, for example a trainer in place of its backend.
    """
    if protocols == INTERFACES["model"] and is_module_class(cls):
        return None
    wanted = {}
    for path in protocols:
        protocol = _load(path)
        methods = [name for name in _members(protocol) if inspect.isfunction(vars(protocol).get(name))]
        if any(hasattr(cls, name) for name in methods):
            return None
        wanted[path] = [_described(protocol, name) for name in methods]
    return _reported(cls, wanted)


def _reported(cls: type, wanted: Mapping[str, Sequence[str]]) -> str | None:
    """Return what a class lacks for each protocol as a sentence; None if it lacks nothing for one of them."""
    if not all(wanted.values()):
        return None
    needed = " or ".join(f"{' and '.join(lacks)} ({path.replace(':', '.')})" for path, lacks in wanted.items())
    return f"{cls.__name__} has no {needed}; add it"


def _load(path: str) -> type:
    module, name = path.split(":")
    found: type = getattr(importlib.import_module(module), name)
    return found


def _lacks(instance: object, protocol: type) -> list[str]:
    """Describe the members of `protocol` that the instance does not have, or has only from the protocol itself."""
    cls = type(instance)
    return [
        _described(protocol, name)
        for name in _members(protocol)
        # The class first: an attribute of the instance may be a property, which may not work yet.
        if inspect.getattr_static(cls, name, None) is vars(protocol).get(name, protocol)
        or not (hasattr(cls, name) or hasattr(instance, name))
    ]


def _members(protocol: type) -> list[str]:
    methods = [
        name for name, value in vars(protocol).items() if inspect.isfunction(value) or isinstance(value, property)
    ]
    return [name for name in (*inspect.get_annotations(protocol), *methods) if not name.startswith("_")]


def _described(protocol: type, name: str) -> str:
    member = vars(protocol).get(name)
    if not inspect.isfunction(member):
        return f"attribute '{name}'"
    signature = inspect.signature(member)
    plain = [parameter.replace(default=inspect.Parameter.empty) for parameter in signature.parameters.values()]
    shown = str(signature.replace(parameters=plain)).replace("'", "")
    return f"method '{'async ' if inspect.iscoroutinefunction(member) else ''}def {name}{shown}'"
