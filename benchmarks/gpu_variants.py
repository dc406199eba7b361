"""What is compared on a GPU: the callback in Lightning's Trainer, beside the Trainer alone."""

from __future__ import annotations

from functools import partial

import in_trainer
from variants import CALLBACK, DEFAULTS, DEFAULTS_IDLE, PEER_IN_TRAINER, TRAINER, in_lightning

FLOOR_IN_TRAINER, EVERYTHING = "floor in a Trainer", "everything"

_in_lightning = partial(in_lightning, workloads=("GPT", "W2"))
_PLAIN = _in_lightning(TRAINER, "no monitor, no logger", in_trainer.nothing)

ON_GPU = {
    "default": (
        _PLAIN,
        _in_lightning(DEFAULTS, "default arguments and store, due at every step", partial(in_trainer.defaults, every_n_steps=1)),
        _in_lightning(DEFAULTS_IDLE, "the same, due at no step", partial(in_trainer.defaults, every_n_steps=in_trainer.NEVER)),
        _in_lightning(CALLBACK, "seven statistics at every step, into monitor.h5", in_trainer.callback),
        _in_lightning(FLOOR_IN_TRAINER, "one norm of each tensor", in_trainer.floor),
        _in_lightning(PEER_IN_TRAINER, "the same seven statistics, kept nowhere", in_trainer.peer, "torch_module_monitor"),
    ),
    "everything": (
        _PLAIN,
        _in_lightning(EVERYTHING, "all kinds and moments, reference, coordinate check, attention, at every step", in_trainer.everything),
    ),
}
"""By set; each is measured by a process of its own, with a Trainer alone of its own."""
