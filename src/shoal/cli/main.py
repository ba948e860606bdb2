"""The entry point of `shoal`: parses the arguments, runs the command, and turns its result into an exit code.

| code | meaning |
|---|---|
| 0 | the run completed |
| 1 | the run failed |
| 2 | the input is wrong, or this machine cannot run it |
| 3 | some nodes failed |
| 129, 130, 143 | the run was interrupted by SIGHUP, Ctrl-C or SIGTERM |
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

from shoal.cli.commands import COMMANDS
from shoal.errors import CheckpointError, DataError, ExperimentError, LaunchError, ShoalError, TopologyError

WRONG_INPUT = 2
STOP_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
"""A signal that is ignored, for example SIGHUP under nohup, stays ignored."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command in `arguments`, by default those of the process, and exit."""
    parsed = _parser().parse_args(arguments)
    command: Callable[[argparse.Namespace], int] = parsed.command
    previous = {
        number: signal.signal(number, _terminate)
        for number in STOP_SIGNALS
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        code = command(parsed)
    except (ExperimentError, CheckpointError, DataError, TopologyError, LaunchError) as error:
        code = _print_error(error, WRONG_INPUT)
    except ShoalError as error:
        code = _print_error(error, 1)
    except KeyboardInterrupt as stop:
        code = 128 + (stop.args[0] if stop.args else signal.SIGINT)
    except BrokenPipeError:  # the program that reads our output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 1
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    sys.exit(code)


def _terminate(number: int, frame: FrameType | None) -> None:
    """End a command on SIGTERM or SIGHUP as on Ctrl-C, with its own exit code."""
    raise KeyboardInterrupt(number)


def _print_error(error: Exception, code: int) -> int:
    from rich.markup import escape

    from shoal.cli.display import console

    text = "\n".join([str(error), *getattr(error, "__notes__", ())])
    console(stderr=True).print(f"[bold red]error:[/bold red] {escape(text)}", highlight=False, soft_wrap=True)
    return code


class CommandParser(argparse.ArgumentParser):
    """The parser of one command. The command's module is imported when its arguments are parsed."""

    module: str | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        if self.module is not None:
            importlib.import_module(self.module).add_arguments(self)
            self.module = None
        return super().parse_known_args(args, namespace)


class ShowVersion(argparse.Action):
    """Prints the version. Finding it takes time, so it is looked up only when asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from importlib.metadata import version

        print(f"shoal {version('shoal')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="shoal", description="Decentralized learning, simulated and real.")
    parser.add_argument("--version", action=ShowVersion, nargs=0, help="show program's version number and exit")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=CommandParser)
    for name, help in COMMANDS.items():
        commands.add_parser(name, help=help).module = f"shoal.cli.commands.{name.replace('-', '_')}"
    return parser
