"""`shoal topology`: measure and draw a graph."""

from __future__ import annotations

import argparse

from shoal.cli.arguments import add_set_option, picture_path, writing
from shoal.cli.display import console, print_line, show_warnings
from shoal.experiment import Experiment, parse_overrides
from shoal.topologies.graph import Mixing


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Measure and draw a graph: shoal topology regular --nodes 16 --set degree=5 --out graph.png"
    parser.add_argument("name", help="the name of a topology, or the TOML file of an experiment")
    parser.add_argument("--nodes", type=int, help="the number of nodes (default: 16, or as in the file)")
    parser.add_argument("--seed", type=int, help="the seed (default: 0, or as in the file)")
    parser.add_argument("--round", type=int, default=0, help="the round whose graph is measured (default: 0)")
    add_set_option(parser, "set a parameter of the topology")
    parser.add_argument("--out", type=picture_path, help="draw the graph to this PNG, SVG or PDF file")
    parser.set_defaults(command=inspect_topology)


def inspect_topology(parsed: argparse.Namespace) -> int:
    from shoal.topologies.measures import measure  # imports SciPy

    experiment = _experiment(parsed)
    with show_warnings(console()):
        mixing = _mixing(experiment)
    print_line(str(measure(mixing, parsed.round)))
    if parsed.out is not None:
        from shoal.topologies.drawing import draw

        with writing(parsed.out):
            draw(mixing, parsed.out, parsed.round)
        print_line(f"drawn to {parsed.out}")
    return 0


def _experiment(parsed: argparse.Namespace) -> Experiment:
    options = {f"topology.{key}": value for key, value in parse_overrides(parsed.settings).items()}
    options.update({key: value for key in ("nodes", "seed") if (value := getattr(parsed, key)) is not None})
    if parsed.name.endswith(".toml"):
        return Experiment.from_file(parsed.name, options)
    table = {"name": "topology", "topology": {"name": parsed.name}}
    return Experiment.from_table(table, options, source="topology")


def _mixing(experiment: Experiment) -> Mixing:
    if not experiment.topology.traits.needs_labels:
        return Mixing(experiment.topology.build().build(experiment.nodes, experiment.seed), experiment.weights)
    from shoal.experiment.setup import Setup  # loads the data, whose labels the graph depends on

    return Setup(experiment).mixing
