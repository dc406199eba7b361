"""The losses of a run: its first ones and last ones, how far they rise, and from when on they stall."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from lightning_module_monitor.health.loss_tests import A_LITTLE, excludes_fall

MIN_LOSSES = 10
"""Number of losses below which a run is not judged by them."""
MIN_FOR_THIRDS = 15
"""Number of losses from which the last third is compared with the first; below it are halves."""
MIN_IN_THIRD = 4
"""Number of losses in a third of the records below which a loss is not judged to have stalled."""
CONVERGED = 1 / 3
"""A loss below this part of its first value has converged where it stalls."""
NUM_FIRST = 5
"""Number of losses that are the start of a loss that diverges."""


def num_at_end(num_records: int) -> int:
    """Number of records at the start and at the end of a run that are compared: a third of all, or half of few."""
    return num_records // (2 if num_records < MIN_FOR_THIRDS else 3)


@dataclass
class Losses:
    """The losses of the records of a run."""

    steps: list[int] = field(default_factory=list)
    values: list[float] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.values)

    def add(self, step: int, loss: float) -> None:
        """Add the loss of a record."""
        self.steps.append(step)
        self.values.append(loss)

    @property
    def first(self) -> float:
        """The first finite loss; NaN without one."""
        return next(filter(math.isfinite, self.values), math.nan)

    @property
    def largest(self) -> float:
        """The largest loss; infinite if one was not finite."""
        return max(self.values, default=math.nan) if self.are_finite else math.inf

    @property
    def finite(self) -> list[float]:
        """The finite losses."""
        return [*filter(math.isfinite, self.values)]

    @property
    def are_finite(self) -> bool:
        """Whether all losses are finite."""
        return all(map(math.isfinite, self.values))

    @property
    def has_negative(self) -> bool:
        """Whether a loss was below 0, or the first one 0: then a ratio to the first loss means nothing."""
        return any(loss < 0 for loss in self.values) or self.first == 0

    @property
    def num_steps(self) -> int:
        """Number of steps from the first record to the last."""
        return self.steps[-1] - self.steps[0] if self.steps else 0

    @property
    def ends(self) -> tuple[list[float], list[float]]:
        """The finite losses of the first and the last third of the records; of halves where they are few."""
        losses = self.finite
        num = num_at_end(len(losses))
        return losses[:num], losses[len(losses) - num :]

    @property
    def last_median(self) -> float:
        """The median of the last third of the finite losses; NaN without any."""
        return float(np.median(self.ends[1] or math.nan))

    @property
    def stalled_since(self) -> int | None:
        """The step from which on the loss does not fall any more, far above what a converged run reaches; ``None`` if it falls.

        The last third of the records is compared with the third before it, so the loss may have stalled earlier.
        """
        records = [(step, loss) for step, loss in zip(self.steps, self.values, strict=True) if math.isfinite(loss)]
        num = len(records) // 3
        if num < MIN_IN_THIRD:
            return None
        before, after = ([loss for _step, loss in part] for part in (records[-2 * num : -num], records[-num:]))
        has_converged = np.median(after) < CONVERGED * self.first
        return None if has_converged or not excludes_fall(before, after, A_LITTLE) else records[-2 * num][0]

    @property
    def falls_at_end(self) -> bool:
        """Whether the median of the last third of the finite losses is below that of the third before by a part of their fall."""
        losses = self.finite
        num = num_at_end(len(losses))
        before = losses[len(losses) - 2 * num : len(losses) - num]
        return self.last_median < float(np.median(before or math.nan)) - A_LITTLE * abs(self.first - self.last_median)

    @property
    def rise(self) -> float:
        """The newest loss relative to the largest of the first losses; 0 if the rise is within the noise, or not known.

        NaN for losses below 0: a loss that crosses 0 has no factor by which it grows.
        """
        if min(self.values, default=0.0) < 0:
            return math.nan
        if len(self.values) <= NUM_FIRST:
            return 0.0
        first, newest = self.values[:NUM_FIRST], self.values[-1]
        if not all(map(math.isfinite, [*first, newest])) or min(first) <= 0 or newest <= max(first):
            return 0.0
        changes = np.abs(np.diff(np.log([loss for loss in self.values[:-1] if 0 < loss < math.inf])))
        spread = 1.05 * float(np.median(changes))  # the standard deviation of the logarithm, of normal noise
        return newest / max(first) if math.log(newest / max(first)) > 2 * spread else 0.0

    @property
    def has_risen(self) -> bool:
        """Whether the loss rose above its first values, or jumped."""
        if not self.are_finite:
            return True
        losses = self.values
        if len(losses) < 2:
            return False
        lowest = np.minimum.accumulate(losses)
        jump = max(loss - low for loss, low in zip(losses[1:], lowest[:-1], strict=True))
        later = np.median(losses[len(losses) // 2 :])
        return bool(max(losses[1:]) > 1.1 * losses[0] or jump > 0.5 * abs(losses[0]) or later > 1.1 * losses[0])
