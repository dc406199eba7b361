"""Calls of a LightningModule that are none: under DDP Lightning runs ``training_step`` by calling the module."""

from __future__ import annotations

from contextlib import ExitStack

from lightning.pytorch import LightningModule

from lightning_module_monitor.model.hooks import HookSet, UncopiedHook
from lightning_module_monitor.monitor import ModuleMonitor


class RedirectedCalls:
    """Keeps the monitor from seeing them, so that it sees the same as in one process.

    DDP's forward calls the module, whose own ``forward`` Lightning has replaced for this one call by ``training_step``. What
    that returns is the loss and no activation. So the monitor is blind while the hooks of such a call run, from the first to
    the last one before it, and after it; within, it sees.

    Args:
        module: The LightningModule.
        monitor: Its hooks are on the module by now.
    """

    def __init__(self, module: LightningModule, monitor: ModuleMonitor) -> None:
        self._monitor = monitor
        self._hooks = HookSet()
        self._silence = ExitStack()
        self._are_redirected: list[bool] = []
        """Of the calls that run, the outermost first."""
        before, after = UncopiedHook(self._before), UncopiedHook(self._after)
        blind, see = UncopiedHook(self._blind), UncopiedHook(self._see)
        self._hooks.add(module.register_forward_pre_hook(before, prepend=True))
        self._hooks.add(module.register_forward_pre_hook(see))
        self._hooks.add(module.register_forward_hook(blind, prepend=True, always_call=True))
        self._hooks.add(module.register_forward_hook(after, always_call=True))

    def close(self) -> None:
        """Take the hooks off."""
        self._hooks.close()
        self._silence.close()

    def _before(self, module: LightningModule, *_arguments: object) -> None:
        # Lightning's own name for what it puts there: strategies/strategy.py, _ForwardRedirection.
        self._are_redirected.append(getattr(module.__dict__.get("forward"), "__name__", "") == "wrapped_forward")
        self._blind()

    def _after(self, *_arguments: object) -> None:
        self._see()
        if self._are_redirected:
            self._are_redirected.pop()

    def _blind(self, *_arguments: object) -> None:
        if self._are_redirected and self._are_redirected[-1]:
            self._silence.enter_context(self._monitor.no_monitor())

    def _see(self, *_arguments: object) -> None:
        if self._are_redirected and self._are_redirected[-1]:
            self._silence.close()
