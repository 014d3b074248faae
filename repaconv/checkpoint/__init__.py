"""Reading checkpoints: containers, weight sets, names. Nothing in a file is ever run."""

from repaconv.checkpoint.claims import claimed_accuracy as claimed_accuracy
from repaconv.checkpoint.facts import require_exact as require_exact
from repaconv.checkpoint.facts import require_sound as require_sound
from repaconv.checkpoint.mapped import drop_pages as drop_pages
from repaconv.checkpoint.mmconfig import find_typed as find_typed
from repaconv.checkpoint.mmconfig import read_mmconfig as read_mmconfig
from repaconv.checkpoint.read import Checkpoint as Checkpoint
from repaconv.checkpoint.read import read_checkpoint as read_checkpoint
