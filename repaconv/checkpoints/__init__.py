"""Read checkpoint files safely, without running code in them."""

from repaconv.checkpoints.checkpoint_reader import Checkpoint as Checkpoint
from repaconv.checkpoints.checkpoint_reader import read_checkpoint as read_checkpoint
from repaconv.checkpoints.claimed_accuracy import claimed_accuracy as claimed_accuracy
from repaconv.checkpoints.memory_mapping import drop_pages as drop_pages
from repaconv.checkpoints.mmengine_config import find_typed as find_typed
from repaconv.checkpoints.mmengine_config import read_mmconfig as read_mmconfig
from repaconv.checkpoints.tensor_sanity_checks import require_exact as require_exact
from repaconv.checkpoints.tensor_sanity_checks import require_sound as require_sound
