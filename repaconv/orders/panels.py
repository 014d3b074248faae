"""The groups in which `--help` lists the options of a command."""

INPUT = "Input"
TARGET = "Target"
IMAGES = "Images and labels"
SHAPES = "Shapes"
PRECISION = "Lower precision"
GRAPH = "Graph"
CONVERSION = "Conversion"
TRAINING = "Training"
SEARCH = "Search"
MEASURE = "Measurement"
BASELINE = "Baseline"
VERIFICATION = "Verification"
CLUSTER = "Cluster"
OUTPUT = "Output"

ORDER = (
    INPUT,
    TARGET,
    IMAGES,
    SHAPES,
    PRECISION,
    GRAPH,
    CONVERSION,
    TRAINING,
    SEARCH,
    MEASURE,
    BASELINE,
    VERIFICATION,
    CLUSTER,
    OUTPUT,
)
"""As `--help` lists them."""
