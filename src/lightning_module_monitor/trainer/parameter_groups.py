"""The numbers of parameter groups, by which their learning rates are recorded."""

from __future__ import annotations

from collections.abc import Sequence

from torch.optim import Optimizer


class ParameterGroups:
    """Numbers the parameter groups of all optimizers: in the order of the optimizers, and those that are added during the run behind them.

    So a learning rate keeps its key when another optimizer gets a further group, as from BackboneFinetuning.
    """

    def __init__(self) -> None:
        self.places: list[tuple[int, int]] = []
        """The place of each group: the number of its optimizer, and its own number there. Part of the state of a resumed run."""

    def numbered(self, optimizers: Sequence[Optimizer]) -> list[tuple[Optimizer, int]]:
        """The groups that the optimizers have now, each as its optimizer and its own number there.

        All are numbered anew if a group is gone.
        """
        places = [(number, group) for number, optimizer in enumerate(optimizers) for group in range(len(optimizer.param_groups))]
        if {*places} != {*self.places}:
            known = self.places if {*self.places} <= {*places} else []
            self.places = [*known, *(place for place in places if place not in known)]
        return [(optimizers[number], group) for number, group in self.places]
