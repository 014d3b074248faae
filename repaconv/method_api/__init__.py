"""The API that a method implements and uses: contract, settings, preprocessing and measured fold errors."""
