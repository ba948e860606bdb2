"""Checks of the sharings of an experiment, which need the model."""

from __future__ import annotations

import itertools

from shoal.errors import ExperimentError, MessageError
from shoal.experiment.experiment import Experiment
from shoal.experiment.registry import Component, registry
from shoal.sharing.sharing import NodeAware, NodeInfo, PayloadChecker, Sharing, payload_for
from shoal.types import Params


def check_sharings(experiment: Experiment, initial: Params, shapes: tuple[tuple[int, ...], ...]) -> None:
    """Start every sharing once, and let each check a payload of every other one.

    Raises `ExperimentError` if a sharing does not fit the model, or cannot read the payloads of another node.
    `initial` is the model that nodes start from, `shapes` are those of its tensors.
    """
    started: list[tuple[Component, Sharing]] = []
    for component in _sharings(experiment):
        sharing: Sharing = component.build()
        if isinstance(sharing, NodeAware):
            sharing.bind(NodeInfo(0, experiment.nodes, experiment.seed, shapes))
        try:
            sharing.start(initial)
        except ValueError as error:
            raise ExperimentError([f"sharing = {component.name!r}: {error}"], experiment.name) from error
        if component.name in registry("sharing"):  # a plug-in may be incompatible on purpose
            started.append((component, sharing))
    problems = [
        f"sharing = {_describe(theirs)} cannot read the payloads of {_describe(ours)}, which other nodes use: "
        f"{reason}; let all nodes use one sharing"
        for (ours, sender), (theirs, receiver) in itertools.permutations(started, 2)
        if (reason := _rejection(sender, receiver, initial)) is not None
    ]
    if problems:
        raise ExperimentError(problems, experiment.name)


def _sharings(experiment: Experiment) -> list[Component]:
    """Return the different sharings of all nodes that send models; the service node of a topology sends none."""
    nodes = range(experiment.size) if experiment.group else range(1)
    used = [experiment.settings(node).sharing for node in nodes if node != experiment.services.get("topology")]
    return list({repr(component): component for component in used}.values())


def _rejection(sender: Sharing, receiver: Sharing, initial: Params) -> str | None:
    """Return why `receiver` rejects a payload of `sender`; None if it does not."""
    outgoing = sender.outgoing(initial, 0)
    try:
        if isinstance(receiver, PayloadChecker):
            receiver.check(payload_for(outgoing, 1), initial)
    except MessageError as error:
        return str(error)
    return None


def _describe(component: Component) -> str:
    """Return a component as an experiment file has it."""
    given = {key: value for key, value in component.options.items() if value is not None}
    shown = {key: _describe(value) if isinstance(value, Component) else repr(value) for key, value in given.items()}
    options = "".join(f", {key} = {value}" for key, value in shown.items())
    return f"{{ name = {component.name!r}{options} }}" if options else repr(component.name)
