"""Networks that no method is about: which published one a bare state dict is of, by its tensors' names and shapes."""

from repaconv.networks.index import Match as Match
from repaconv.networks.index import matches as matches
