"""`verify`: compare every link of a run's verification chain."""
