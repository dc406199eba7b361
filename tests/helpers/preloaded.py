"""What processes that train together import, for the server that they are forked from."""

from __future__ import annotations

