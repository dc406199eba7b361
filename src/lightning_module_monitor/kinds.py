"""The kinds of observed tensors, :data:`KINDS`, and names that keys have in every run.

Internal: it may change in any version.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TRAIN = "train"
STAGES = ("validation", "test", "predict")
"""Stages that are named in a key. Training is not: its keys start with the kind."""

OWN_KIND = "monitor"
"""The kind of the monitor's own figures; its keys have no site: ``monitor/errors``."""

CONTEXT_KIND = "context"
"""The kind of a step's context: its loss, logged values and learning rates; its keys have no site."""

FACT_KIND = "fact"
"""The kind of conditions that are judged as values and not recorded as such; see :class:`Facts`."""

LOSS, LEARNING_RATE, BATCH_SIZE = "loss", "lr", "batch_size"
"""Names under :data:`CONTEXT_KIND`: of the training loss, of the first learning rate, and of the number of samples in a step."""

STEP_SKIPPED = "step_skipped"
"""The name of the figure that is 1 where a ``GradScaler`` skipped a step."""

OVERHEAD_FRACTION = "overhead_fraction"
"""The name of the figure that is the share of the time that monitoring takes."""

RCC_SKIPPED_CALLS = "rcc_skipped_calls"
"""The name of the number of calls that the refined coordinate check leaves out, of all ranks."""

DEAD_AFTER = 10
"""Number of monitored steps throughout which a dead unit was zero for every input."""

SINGULAR_VALUES = tuple(f"singular_value_{number + 1}" for number in range(8))
"""The names of the largest singular values of a matrix, from the largest on."""

RESIDUALS = tuple(f"residual_{number + 1}" for number in range(len(SINGULAR_VALUES)))
"""The names of how far each of these is from a singular value at most."""

STEPS_SINCE_NONFINITE = "steps_since_nonfinite"
"""The name of the figure that is how many steps ago a loss or gradient was not finite for the first time since the last record; 0: none."""

SECONDS_PER_STEP = "seconds_per_step"
"""The name of the time that a step took since the last record, where steps are picked by the clock: the largest of all ranks."""

RANK_DISAGREEMENT = "rank_disagreement"
"""The name of the number of parameters that differ between ranks although they must be equal, and of the finding about them."""

OWN_FIGURES = ("errors", OVERHEAD_FRACTION, STEP_SKIPPED, RCC_SKIPPED_CALLS, STEPS_SINCE_NONFINITE, SECONDS_PER_STEP, RANK_DISAGREEMENT)
"""The names under :data:`OWN_KIND`: with them ``monitor`` is the kind, with any other statistic it may be a module's name."""

ROOT_SITE = "_root_"
"""The site of the module that is monitored as a whole."""

SUMMARY_SITE = "_summary_"
"""The site that stands for all of a kind together, where one kind has figures of that sort."""

ROLL_UP_SITES = ("_min_", "_median_", "_max_", "_all_")
"""The sites that stand for all of a kind together in loggers, where there are many keys; the last one is of histograms."""


@dataclass(frozen=True)
class Kind:
    """The properties of a kind."""

    name: str
    site: Literal["module", "parameter"]
    """The sort of its sites: a rule's ``sites`` are matched with names of modules or of parameters."""
    is_relative: bool = False
    """Whether it has a base, as an update has its parameter, and so a ``ratio``."""
    in_every_stage: bool = False
    """Whether it also exists in loops without training."""
    of_heads: bool = False
    """Whether its sites are the heads of the attention within the module, which are known once it runs."""
    of_states: bool = False
    """Whether its sites are the states that optimizers keep of the parameter, which are known once these have stepped."""
    of_layers: bool = False
    """Whether its sites are the linear maps within the module, which the coordinate check compares with the reference's."""
    is_pair: bool = False
    """Whether it compares two tensors, the model's and the reference's, and functions get both."""
    compared_with: tuple[str, ...] = ()
    """What statistics may compare its tensors with: see :attr:`Statistic.compared_with`."""
    needs_reference: bool = False
    """Whether it requires a reference."""
    values: tuple[str, ...] = ()
    """The names of its values, where they are not statistics of a tensor."""
    can_be_captured: bool = False
    """Whether its tensors can be captured as they are."""
    has_units: bool = False
    """Whether its tensors have units, channels or features, as the outputs of a layer have."""
    has_matrices: bool = False
    """Whether its tensors are matrices or stand for some, as parameters do."""
    has_option: bool = False
    """Whether an option of the same name records it, and no rule does."""
    figures: tuple[str, ...] = ()
    """The monitor's own figures that a step has which records it."""

    @property
    def has_late_sites(self) -> bool:
        """Whether its sites, and their keys, are known only after a step in which they occur."""
        return self.of_heads or self.of_states


KINDS = {
    kind.name: kind
    for kind in (
        Kind("activation", "module", in_every_stage=True, can_be_captured=True, has_units=True),
        Kind("activation_gradient", "module", can_be_captured=True, has_units=True),
        *(
            Kind(f"attention_{figure}", "module", in_every_stage=True, of_heads=True)
            for figure in ("entropy", "relative_entropy", "max_logit", "sink")
        ),
        Kind("activation_difference", "module", is_relative=True, is_pair=True, compared_with=("reference",), needs_reference=True),
        *(
            Kind(f"rcc_{term}", "module", of_layers=True, needs_reference=True, figures=(RCC_SKIPPED_CALLS,))
            for term in ("effective_update", "propagating_update", "output", "reference_output", "input", "input_change")
        ),
        *(
            Kind(f"rcc_{name}", "module", of_layers=True, needs_reference=True, values=values, figures=(RCC_SKIPPED_CALLS,))
            for name, values in (("operator_norm", ("update", "reference")), ("alignment", ("effective", "propagating")))
        ),
        Kind("parameter", "parameter", can_be_captured=True, has_matrices=True),
        Kind(
            "parameter_difference",
            "parameter",
            is_relative=True,
            is_pair=True,
            compared_with=("reference",),
            needs_reference=True,
            has_matrices=True,
        ),
        Kind("gradient_before_clip", "parameter", can_be_captured=True, has_matrices=True),
        Kind("gradient", "parameter", can_be_captured=True, has_matrices=True),
        Kind("update", "parameter", is_relative=True, can_be_captured=True, compared_with=("gradient", "previous"), has_matrices=True),
        Kind("optimizer_state", "parameter", of_states=True, compared_with=("gradient",), has_matrices=True),
        Kind("gradient_flow", "module", has_option=True),
        Kind("gradient_noise", "parameter", has_option=True),
    )
}
"""Kind by name, in the order in which their keys are listed."""
