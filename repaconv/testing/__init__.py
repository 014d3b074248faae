"""For tests of others: parity asserted, checkpoints of our own making, and what a plug-in's method must hold."""

from repaconv.testing.conformance import check_method as check_method
from repaconv.testing.conformance import write_example as write_example
from repaconv.testing.parity import assert_parity as assert_parity
