"""What every command can be asked, from Python, the command line and recipes; and reading recipes."""

from repaconv.options.recipe_file import RecipeProblem as RecipeProblem
from repaconv.options.recipe_file import Wrong as Wrong
from repaconv.options.recipe_file import examined as examined
from repaconv.options.recipe_file import read_recipe as read_recipe
from repaconv.options.recipe_sections import BenchSection as BenchSection
from repaconv.options.recipe_sections import BuildSection as BuildSection
from repaconv.options.recipe_sections import BundleSection as BundleSection
from repaconv.options.recipe_sections import ExportSection as ExportSection
from repaconv.options.recipe_sections import Recipe as Recipe
from repaconv.options.recipe_sections import ReportSection as ReportSection
from repaconv.options.recipe_sections import VerifySection as VerifySection
from repaconv.options.recipe_sections import own_file as own_file
from repaconv.options.recipe_sections import schema as schema
