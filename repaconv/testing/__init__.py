"""For tests in other packages: `assert_parity`, example checkpoints, the conformance test of a method."""

from repaconv.testing.conformance import check_method as check_method
from repaconv.testing.conformance import write_example as write_example
from repaconv.testing.parity import assert_parity as assert_parity
