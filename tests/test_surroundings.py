"""What happens around a stage: it is killed, the disk is full, another writes beside it, its file changes."""

from __future__ import annotations

import pytest
from conftest import quick_where
from torture import kills, warm


@pytest.fixture(scope="module", autouse=True)
def _warm():
    """What each child would import for itself."""
    warm.up()


@pytest.mark.parametrize("name", quick_where({"fold"}.__contains__, kills.BY_STEPS, ids=str))
def test_a_stage_that_is_killed_before_any_of_its_steps_completes_by_the_same_command(tmp_path, name):
    assert kills.before_each_step(name, tmp_path) >= 2
