"""Values of a module's own, recorded from inside its ``forward``."""

from __future__ import annotations

from torch import nn

from lightning_module_monitor.model.hooks import is_in_backward, is_tracing
from lightning_module_monitor.monitor import ModuleMonitor, monitor_of


class MonitorMixin:
    """Gives a module the monitor that it is watched by.

    It keeps nothing on the module: a copy, or a module read from a pickle, is watched by nobody until it is given to a monitor. Works
    the same under the callback and in a plain loop::

        class Gated(nn.Module, MonitorMixin):
            def forward(self, x: Tensor) -> Tensor:
                gate = torch.sigmoid(self.gate(x))
                if self.is_monitoring:
                    self.get_module_monitor().log_tensor("gate/blocks.0/open_fraction", (gate > 0.5).float())
                return gate * self.body(x)
    """

    @property
    def is_monitoring(self) -> bool:
        """Whether what happens now is observed: not in the recomputation of a checkpointed forward pass, nor while torch traces."""
        if is_tracing() or is_in_backward():
            return False
        monitor = self.get_module_monitor()
        return monitor is not None and monitor.is_monitoring()

    def get_module_monitor(self) -> ModuleMonitor | None:
        """The monitor that watches this module, ``None`` if none does. Of several one that observes now, else the newest."""
        return monitor_of(self) if isinstance(self, nn.Module) else None
