"""What the whole suite shares: Lightning's log."""

from __future__ import annotations

import logging

# Lightning keeps its messages from the root logger, where caplog reads them, if that has no handler when Lightning is imported.
logging.getLogger("lightning.pytorch").propagate = True
