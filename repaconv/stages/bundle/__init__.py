"""`bundle` and `collect`: measurements on a board that has no repaconv."""
