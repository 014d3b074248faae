"""What a network is for, and how lossy steps are evaluated in that task: one file per task, all with one interface."""
