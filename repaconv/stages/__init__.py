"""One folder per command: `options` declares its options, `stage` does the work, `text` prints the result."""
