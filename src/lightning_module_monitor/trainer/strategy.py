"""Strategies of a Trainer: the ranks that reduce values together, access to parameters, and kinds that cannot be recorded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.amp import GradScaler
from torch.distributed.fsdp import ShardingStrategy

from lightning_module_monitor.config.health_options import ALWAYS, STOP, ParsedHealth
from lightning_module_monitor.distributed.shards import fsdp2_units
from lightning_module_monitor.errors import ConfigError
from lightning_module_monitor.kinds import KINDS
from lightning_module_monitor.lightning_packages import Trainer, is_a
from lightning_module_monitor.plan.matching import token_statistics
from lightning_module_monitor.plan.recipe import Recipe
from lightning_module_monitor.probes.parameters import ParameterAccess
from lightning_module_monitor.statistics.functions import Function
from lightning_module_monitor.statistics.registry import Statistic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_REFERENCE_KINDS = tuple(kind.name for kind in KINDS.values() if kind.needs_reference)
_PARAMETER_KINDS = tuple(kind.name for kind in KINDS.values() if kind.site == "parameter" or kind.needs_reference)


class DeepSpeedAccess(ParameterAccess):
    """Reads whole parameters (the optimizer's float32 copies, if it has any) and whole gradients, by DeepSpeed's public functions.

    Reading a tensor that is laid out over ranks is a collective of DeepSpeed, so all ranks read the same tensors in the same order.
    """

    makes_copies = True

    def parameter(self, parameter: Tensor) -> Tensor | None:
        """The copy that the optimizer updates; for a parameter that is not trained, its value."""
        import deepspeed  # noqa: PLC0415  # is optional, and takes seconds

        if parameter.requires_grad:
            value: Tensor | None = deepspeed.utils.safe_get_full_fp32_param(parameter)
            if value is not None:
                return value
        with deepspeed.zero.GatheredParameters([parameter]):
            return parameter.detach().clone()

    def gradient(self, parameter: Tensor) -> Tensor | None:
        """The gradient, reduced over ranks."""
        import deepspeed  # noqa: PLC0415  # is optional, and takes seconds

        return deepspeed.utils.safe_get_full_grad(parameter) if parameter.requires_grad else None

    def is_empty(self, parameter: Tensor) -> bool:
        """Whether it has no element on any rank; between its uses a parameter of stage 3 has none on this rank."""
        return not getattr(parameter, "ds_numel", parameter.numel())


def is_known(trainer: Trainer) -> bool:
    """Whether the strategy of a Trainer is supported on several ranks; a subclass counts as its base class."""
    strategy = trainer.strategy
    if is_a(strategy, "XLAStrategy"):  # subclasses of DDPStrategy that keep parameters and gradients elsewhere
        return False
    return trainer.world_size == 1 or is_a(strategy, "DDPStrategy", "ModelParallelStrategy", "FSDPStrategy")


def has_parameters(trainer: Trainer) -> bool:
    """Whether parameters keep their names, and the elements that each rank holds are known."""
    strategy: Any = trainer.strategy
    return is_known(trainer) and (not is_a(strategy, "FSDPStrategy") or bool(strategy.kwargs.get("use_orig_params")))


def ranks_of(trainer: Trainer) -> bool | DeviceMesh:
    """The ranks that reduce their values together: ``distributed`` of :class:`~lightning_module_monitor.monitor.ModuleMonitor`."""
    strategy: Any = trainer.strategy
    if is_a(strategy, "ModelParallelStrategy"):
        mesh: DeviceMesh = strategy.device_mesh["tensor_parallel"]
        return mesh
    return is_known(trainer) and trainer.world_size > 1


def can_run_again(trainer: Trainer) -> bool:
    """Whether all ranks together can run a part of a step again on a copy of the model, which FSDP and DeepSpeed do not have."""
    has_copies = not is_a(trainer.strategy, "FSDPStrategy", "DeepSpeedStrategy") and not fsdp2_units(trainer.lightning_module)
    return is_known(trainer) and has_copies


def reads_at_once(trainer: Trainer) -> bool:
    """Whether a value is read without waiting for a device or for other ranks: in host memory, in a single process."""
    return trainer.world_size == 1 and trainer.strategy.root_device.type == "cpu"


def access_of(trainer: Trainer) -> ParameterAccess:
    """The access to parameters and gradients under a strategy."""
    return DeepSpeedAccess() if is_a(trainer.strategy, "DeepSpeedStrategy") else ParameterAccess()


def scaler_of(trainer: Trainer) -> GradScaler | None:
    """The scaler of the loss under 16-mixed, which may skip a step."""
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return scaler if isinstance(scaler, GradScaler) and scaler.is_enabled() else None


def unavailable_kinds(trainer: Trainer) -> tuple[str, ...]:
    """The kinds that cannot be recorded under a strategy."""
    strategy: Any = trainer.strategy
    if not has_parameters(trainer):
        return _PARAMETER_KINDS
    if is_a(strategy, "DeepSpeedStrategy"):
        configuration = strategy.config if isinstance(strategy.config, dict) else {}
        # DeepSpeed clips within its step: the clipped gradient cannot be read.
        clips = trainer.gradient_clip_val or configuration.get("gradient_clipping")
        return (*_REFERENCE_KINDS, "gradient") if clips else _REFERENCE_KINDS
    return ()


def check_strategy(trainer: Trainer, health: ParsedHealth, recipe: Recipe) -> None:
    """Refuse options that a strategy cannot satisfy.

    Under an unknown strategy these are findings of one rank that stop the run or save a checkpoint, which needs all ranks. Of parameters
    that are laid out over ranks these are token norms, and functions of states; under DeepSpeed states, and gradients after a step.
    """
    strategy: Any = trainer.strategy
    name = type(strategy).__name__
    if not is_known(trainer) and trainer.world_size > 1:
        together = [f"{rule.name!r}: then {action!r}" for rule in health.rules for action in rule.then if action in ("stop", "checkpoint")]
        if health.nonfinite == STOP:
            together.insert(0, f"health.nonfinite: {STOP!r}")
        if together:
            reason = f"under {name} each rank judges its own values, and the others would wait for it"
            raise ConfigError(f"{together[0]}: {reason}; expected 'warn' or 'capture', or nonfinite: {ALWAYS}.")
    if is_a(strategy, "DeepSpeedStrategy"):
        _check_deepspeed(name, recipe)
    is_fsdp1 = is_a(strategy, "FSDPStrategy") and strategy.sharding_strategy is not ShardingStrategy.NO_SHARD
    if is_fsdp1 or is_a(strategy, "ModelParallelStrategy"):
        for rule in recipe.rules:
            statistics = token_statistics(rule)
            kinds = [kind for kind in rule.kinds if KINDS[kind].site == "parameter"]
            if statistics and kinds:
                reason = f"under {name} a rank has parts of the tokens of parameters"
                raise ConfigError(f"{rule.label}.statistics {statistics[0]!r}: {reason}; expected a rule without {', '.join(kinds)}.")
            functions = [output for output, value in rule.outputs.items() if isinstance(value, Function)]
            states = [kind for kind in rule.kinds if KINDS[kind].of_states]
            if functions and states:
                reason = f"under {name} a rank has parts of the states, and functions get whole tensors"
                raise ConfigError(f"{rule.label}.functions {functions[0]!r}: {reason}; expected a rule without {states[0]}.")


def _check_deepspeed(name: str, recipe: Recipe) -> None:
    """Refuse what DeepSpeed's engine does not show: it keeps the states itself, and clears the gradients in its step."""
    for rule in recipe.rules:
        states = [kind for kind in rule.kinds if KINDS[kind].of_states]
        if states:
            reason = f"{name} keeps the states of the optimizer in parts of its own"
            raise ConfigError(f"{rule.label}.kinds {states[0]!r}: {reason}; expected another kind.")
        cosines = [known for known, value in rule.outputs.items() if isinstance(value, Statistic) and value.compared_with == "gradient"]
        if cosines:
            reason = f"{name} clears gradients in its step"
            raise ConfigError(f"{rule.label}.statistics {cosines[0]!r}: {reason}; expected another statistic.")


def check_gradient_noise(trainer: Trainer) -> None:
    """Refuse gradient noise where there is one gradient a step, or where gradients of micro-batches cannot be observed."""
    name = type(trainer.strategy).__name__
    if not is_known(trainer) or is_a(trainer.strategy, "FSDPStrategy", "ModelParallelStrategy", "DeepSpeedStrategy"):
        why = f"{name} shows no rank the whole gradient of its own micro-batch"
        raise ConfigError(f"gradient_noise: {why}; expected one device, or DDPStrategy.")
    module = trainer.lightning_module
    if not module.automatic_optimization:
        why = f"{type(module).__name__} uses manual optimization, and which gradients add up is not known"
        raise ConfigError(f"gradient_noise: {why}; expected automatic optimization.")
    callbacks = trainer.callbacks  # type: ignore[union-attr]  # set by a connector, where mypy does not look
    changes = any(is_a(callback, "GradientAccumulationScheduler") for callback in callbacks)
    if trainer.accumulate_grad_batches == 1 and trainer.world_size == 1 and not changes:
        why = "it compares the gradients of a step, and accumulate_grad_batches is 1 on one device: there is one"
        raise ConfigError(f"gradient_noise: {why}; expected Trainer(accumulate_grad_batches=2) or more, or DDP on several devices.")


def describe_left_out(trainer: Trainer, kinds: list[str]) -> str:
    """A message: the kinds that are not recorded under a strategy, the reason, and the ranks whose values are recorded."""
    name = type(trainer.strategy).__name__
    left_out = f"{', '.join(kinds)} {'is' if len(kinds) == 1 else 'are'} left out" if kinds else "nothing of parameters is recorded"
    if is_a(trainer.strategy, "DeepSpeedStrategy"):
        return f"{name} clips gradients inside its step and cannot hold a reference: {left_out}. gradient_before_clip is recorded."
    if is_known(trainer):
        return f"{name} with use_orig_params=False makes flat parameters without names: {left_out}. use_orig_params=True gives all kinds."
    ranks = "; values are those of rank 0 alone" if trainer.world_size > 1 else ""
    works = "DDPStrategy, FSDPStrategy, ModelParallelStrategy and their subclasses give all kinds"
    return f"{name} keeps parameters in a way that is not known: {left_out}{ranks}. {works}."
