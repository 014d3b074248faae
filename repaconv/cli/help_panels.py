"""The groups in which `repaconv --help` lists the commands."""

STEPS = "Main steps"
WORKFLOWS = "Whole workflows"
SEARCH = "Search and conversion"
FLEET = "Fleet and boards"
ENVIRONMENT = "Environment"
