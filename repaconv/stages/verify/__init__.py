"""`verify`: every link of the verification chain of a run."""
