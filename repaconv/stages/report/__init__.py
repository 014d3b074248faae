"""`report`: the page of a run, or of several."""
