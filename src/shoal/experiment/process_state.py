"""What a run changes in the process that starts it: global generators, and numbers of threads."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import numpy as np

from shoal.experiment.experiment import Experiment


@contextmanager
def process_state_kept(experiment: Experiment) -> Iterator[None]:
    """Restore afterwards what a simulation of `experiment` changes in this process."""
    traits = experiment.trainer.traits
    with ExitStack() as stack:
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state(legacy=False))
        if traits.imports_torch or experiment.augmentation:
            import torch  # noqa: F401  # to know its state before
        if "torch" in sys.modules:
            stack.enter_context(_torch_state_kept())
        if traits.limits_threads:
            from threadpoolctl import threadpool_limits

            stack.enter_context(threadpool_limits())  # without limits: it restores the limits that the trainer replaces
        yield


def reseed_generators() -> None:
    """Give NumPy's global generator a random seed, as in a new interpreter: a forked process has its parent's state.

    Python does this for its own generator. That of torch begins with the same seed in every interpreter.
    """
    np.random.seed()


@contextmanager
def _torch_state_kept() -> Iterator[None]:
    import torch

    threads = torch.get_num_threads()
    initialized: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    accelerators = range(torch.cuda.device_count()) if initialized else ()
    with torch.random.fork_rng(devices=accelerators):
        try:
            yield
        finally:
            torch.set_num_threads(threads)
