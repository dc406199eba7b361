"""Compiled code runs as it was written while a step is monitored: a graph does not see hooks that are put on later."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager
from typing import ClassVar

import torch


class Uncompiled:
    """Makes everything that ``torch.compile`` has wrapped run uncompiled, from :meth:`begin` to :meth:`end`.

    Nothing is compiled again for that, before or after: the graphs stay, and what is called meanwhile goes around them.
    Several may overlap in any order, of two monitors in one loop, say.
    """

    _begun: ClassVar[set[Uncompiled]] = set()
    _stance: ClassVar[AbstractContextManager[None] | None] = None

    def begin(self) -> None:
        """Run uncompiled from now on. Where the compiler was never loaded there is nothing to do."""
        # A function that is compiled around the model cannot be found: whoever has compiled anything has loaded this.
        # Before torch 2.6 there is no stance; the callback refuses compiled models there.
        if "torch._dynamo" in sys.modules and hasattr(torch.compiler, "set_stance"):
            Uncompiled._begun.add(self)
            if Uncompiled._stance is None:
                Uncompiled._stance = torch.compiler.set_stance("force_eager")
                Uncompiled._stance.__enter__()

    def end(self) -> None:
        """Run what is compiled again; a second call does no harm."""
        Uncompiled._begun.discard(self)
        if not Uncompiled._begun and Uncompiled._stance is not None:
            Uncompiled._stance.__exit__(None, None, None)
            Uncompiled._stance = None
