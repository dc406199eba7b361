"""Compiled code runs as it was written while a step is monitored: a graph does not see hooks that are put on later."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager

import torch


class Uncompiled:
    """Makes everything that ``torch.compile`` has wrapped run uncompiled, from :meth:`begin` to :meth:`end`.

    Nothing is compiled again for that, before or after: the graphs stay, and what is called meanwhile goes around them.
    Several may overlap in any order, of two monitors in one loop, say.
    """

    _num_begun = 0
    _stance: AbstractContextManager[None] | None = None

    def __init__(self) -> None:
        self._has_begun = False

    def begin(self) -> None:
        """Run uncompiled from now on. Where the compiler was never loaded there is nothing to do."""
        # A function that is compiled around the model cannot be found: whoever has compiled anything has loaded this.
        # Before torch 2.6 there is no stance; the callback refuses compiled models there.
        if not self._has_begun and "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            self._has_begun = True
            if Uncompiled._num_begun == 0:
                Uncompiled._stance = torch.compiler.set_stance("force_eager")
                Uncompiled._stance.__enter__()
            Uncompiled._num_begun += 1

    def end(self) -> None:
        """Run what is compiled again; a second call does no harm."""
        if self._has_begun:
            self._has_begun = False
            Uncompiled._num_begun -= 1
            if Uncompiled._num_begun == 0 and Uncompiled._stance is not None:
                Uncompiled._stance.__exit__(None, None, None)
                Uncompiled._stance = None
