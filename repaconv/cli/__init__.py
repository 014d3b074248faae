"""The command line: commands, help, and the only code that prints."""
