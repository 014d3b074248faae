"""A recipe: what to do with one checkpoint and what must hold, as a TOML file that is committed with the code.

checkpoint = "weights/deit.pth"

[set]
num_heads = 3

[verify]
inputs = "weights/deit.npz"
require = ["recorded"]

[export]
precisions = ["fp32", "int8"]

[bench]
baseline = "baselines.json"
max_regression = 0.05
"""

from repaconv.recipe.keys import BenchSection as BenchSection
from repaconv.recipe.keys import BuildSection as BuildSection
from repaconv.recipe.keys import BundleSection as BundleSection
from repaconv.recipe.keys import ExportSection as ExportSection
from repaconv.recipe.keys import Recipe as Recipe
from repaconv.recipe.keys import ReportSection as ReportSection
from repaconv.recipe.keys import VerifySection as VerifySection
from repaconv.recipe.keys import own_file as own_file
from repaconv.recipe.keys import schema as schema
from repaconv.recipe.reading import RecipeProblem as RecipeProblem
from repaconv.recipe.reading import Wrong as Wrong
from repaconv.recipe.reading import examined as examined
from repaconv.recipe.reading import read_recipe as read_recipe
