"""Which gradients that arrive at outputs are those of the loss."""

from __future__ import annotations

from torch import Tensor

from lightning_module_monitor.model.hooks import is_tracing
from lightning_module_monitor.probes.probe import Probe


class BackwardProbe(Probe):
    """A probe of gradients that arrive at outputs."""

    counts_gradients = True
    """Whether gradients that arrive now count: not those of an inner ``autograd.grad``."""

    scale: Tensor | None = None
    """What the loss that is differentiated was multiplied by, if it was."""

    def takes_gradients(self) -> bool:
        """Whether a gradient that arrives now is observed."""
        return self.counts_gradients and not is_tracing()

    def begin_backward(self, scale: Tensor | None = None) -> None:
        """Gradients that arrive from now on count."""
        self.counts_gradients = True
        self.scale = scale

    def end_backward(self) -> None:
        """Gradients that arrive from now on, of an inner ``autograd.grad``, do not count."""
        self.counts_gradients = False
