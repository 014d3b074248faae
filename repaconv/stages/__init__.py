"""One folder per command: `options` it takes, `stage` that does the work, `text` that shows its result."""
