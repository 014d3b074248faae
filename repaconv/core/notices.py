"""What users are told besides a result: which run is taken, which files were removed.

In Python it is the logger ``repaconv``: a warning for what is removed, the rest is information. The command line prints
both to stderr, with ``-q``, too.
"""

from __future__ import annotations

import logging

LOGGER = logging.getLogger("repaconv")
