"""What a run is of, whatever it came from: its network as given, folded and as graphs, each held to float64."""
