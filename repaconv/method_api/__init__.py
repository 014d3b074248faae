"""What a method is written against: its contract, settings, preprocessing and the error of a fold."""
