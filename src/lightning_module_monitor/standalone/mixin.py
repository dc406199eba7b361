"""Values that a module records from within its ``forward``."""

from __future__ import annotations

from torch import nn

from lightning_module_monitor.model.hooks import is_in_backward, is_tracing
from lightning_module_monitor.monitor import ModuleMonitor, monitor_of


class MonitorMixin:
    """Gives a module access to its monitor, under the callback and in a plain loop.

    It stores nothing on the module: a copy, or a module from a pickle, has no monitor until it is set as the module of one::

        class Gated(nn.Module, MonitorMixin):
            def forward(self, x: Tensor) -> Tensor:
                gate = torch.sigmoid(self.gate(x))
                if self.is_monitoring:
                    self.get_module_monitor().log_tensor("gate/blocks.0/open_fraction", (gate > 0.5).float())
                return gate * self.body(x)
    """

    @property
    def is_monitoring(self) -> bool:
        """Whether this call is observed: not in the recomputation of a checkpointed forward pass, nor while torch traces."""
        if is_tracing() or is_in_backward():
            return False
        monitor = self.get_module_monitor()
        return monitor is not None and monitor.is_monitoring()

    def get_module_monitor(self) -> ModuleMonitor | None:
        """The monitor of this module, or ``None``. Among several, one that observes now, otherwise the newest."""
        return monitor_of(self) if isinstance(self, nn.Module) else None
