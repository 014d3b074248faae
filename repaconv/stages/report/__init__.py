"""`report`: write the report of a run, or a comparison of several runs."""
