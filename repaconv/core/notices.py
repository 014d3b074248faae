"""The logger for notices to the user: which run is used, which files were removed.

It is the logger ``repaconv``. A removed file is a warning, everything else is information. The command line prints both
to stderr, also with ``-q``.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("repaconv")
