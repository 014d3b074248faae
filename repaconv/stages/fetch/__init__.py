"""`fetch`: a download, pinned by its hash."""
