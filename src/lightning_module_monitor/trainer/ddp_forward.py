"""Under DDP Lightning runs ``training_step`` by calling the LightningModule, which is no call of its ``forward``."""

from __future__ import annotations

from contextlib import ExitStack

from lightning.pytorch import LightningModule

from lightning_module_monitor.model.hooks import HookSet, UncopiedHook
from lightning_module_monitor.monitor import ModuleMonitor


class DDPForwardGuard:
    """Hides these calls from the monitor, so that it observes the same as in one process.

    DDP's forward calls the module, whose ``forward`` Lightning has replaced for this one call by ``training_step``. That returns the loss,
    which is no activation. So nothing is observed while the hooks of such a call run, the monitor's among them; within the call, all is.

    Args:
        module: The LightningModule. The hooks of the monitor are on it already.
        monitor: The monitor.
    """

    def __init__(self, module: LightningModule, monitor: ModuleMonitor) -> None:
        self._monitor = monitor
        self._hooks = HookSet()
        self._silence = ExitStack()
        self._are_redirected: list[bool] = []
        """One for each call that runs, the outermost first."""
        first, last = UncopiedHook(self._begin), UncopiedHook(self._end)
        silence, observe = UncopiedHook(self._silenced), UncopiedHook(self._observed)
        self._hooks.add(module.register_forward_pre_hook(first, prepend=True))
        self._hooks.add(module.register_forward_pre_hook(observe))
        self._hooks.add(module.register_forward_hook(silence, prepend=True, always_call=True))
        self._hooks.add(module.register_forward_hook(last, always_call=True))

    def close(self) -> None:
        """Remove the hooks."""
        self._hooks.close()
        self._silence.close()

    def _begin(self, module: LightningModule, *_arguments: object) -> None:
        # Lightning's own name for the replacement: strategies/strategy.py, _ForwardRedirection.
        self._are_redirected.append(getattr(module.__dict__.get("forward"), "__name__", "") == "wrapped_forward")
        self._silenced()

    def _end(self, *_arguments: object) -> None:
        self._observed()
        if self._are_redirected:
            self._are_redirected.pop()

    def _silenced(self, *_arguments: object) -> None:
        if self._are_redirected and self._are_redirected[-1]:
            self._silence.enter_context(self._monitor.no_monitor())

    def _observed(self, *_arguments: object) -> None:
        if self._are_redirected and self._are_redirected[-1]:
            self._silence.close()
