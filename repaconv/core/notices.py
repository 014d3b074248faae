"""What users are told besides a result: which run is taken, which files were removed.

In Python it is the logger ``repaconv``; the command line prints its records to stderr, with ``-q``, too.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("repaconv")
LOGGER.setLevel(logging.INFO)  # of its own: `repaconv.core.progress.only_errors` quiets the root logger
