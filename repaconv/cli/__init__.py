"""The command line: commands, help, and all printing."""
