"""Names of torch that are valid without a look at torch: experiments are validated in processes that do not import it.

A name that is not here may be one of a newer torch: then torch is imported, and decides.
"""

from __future__ import annotations

_BETAS = ("betas", "eps", "weight_decay")

OPTIMIZER_OPTIONS: dict[str, frozenset[str]] = {
    name: frozenset(["lr", "maximize", *options])
    for name, options in {
        "sgd": ("momentum", "dampening", "weight_decay", "nesterov"),
        "adam": (*_BETAS, "amsgrad"),
        "adamw": (*_BETAS, "amsgrad"),
        "adamax": _BETAS,
        "nadam": (*_BETAS, "momentum_decay"),
        "radam": _BETAS,
        "rmsprop": ("alpha", "eps", "weight_decay", "momentum", "centered"),
        "adagrad": ("lr_decay", "weight_decay", "initial_accumulator_value", "eps"),
        "adadelta": ("rho", "eps", "weight_decay"),
        "asgd": ("lambd", "alpha", "t0", "weight_decay"),
        "rprop": ("etas", "step_sizes"),
    }.items()
}
"""Optimizers of torch.optim, in lower case, and their options."""

LOSSES = frozenset(
    [
        "bce",
        "bcewithlogits",
        "crossentropy",
        "huber",
        "kldiv",
        "l1",
        "mse",
        "multilabelmargin",
        "multilabelsoftmargin",
        "multimargin",
        "nll",
        "poissonnll",
        "smoothl1",
        "softmargin",
    ]
)
"""Losses of torch.nn, as `shoal.training.losses.loss_key` writes them."""
SMOOTHED_LOSSES = frozenset(["crossentropy"])
"""Those of them with label smoothing."""
