"""What every package uses: files, run folders, errors, progress, plug-ins."""
