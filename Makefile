PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
TRT_RTX := tensorrt-rtx-cu13 tensorrt-rtx-cu13-bindings tensorrt-rtx-cu13-libs
# Each worker may take 2 GiB. Whole test files stay together while every worker has one; then the rest is shared.
# One more than processors: some tests wait for processes of their own.
WORKERS := -n $(shell n=$$(getconf _NPROCESSORS_ONLN); echo $$((n < 7 ? n + 1 : 8))) --dist worksteal

.PHONY: demo test test-quick test-lowest test-slow release-check dist golden golden-write lint arm docker-steps torture mutants code-mutants train clean
.PHONY: recipes bench-throughput bench-channel-padding bench-slow-kernels bench-convert-digits bench-convert-textures bench-competitors bench-estimate bench-export bench-reparameterized bench-presets bench-fixed-batch bench-fold bench-riformer-graphs bench-gate bench-manual-baseline bench-precision-tolerances bench-competitors-arbitrary bench-task-tolerances bench-statistical-power bench-precision bench-profile bench-roofline bench-tasks bench-pytorch bench-tuner bench-ultralytics bench-rewrite bench-zoo
.PHONY: gpu-kit gpu-results gpu-bare docs lock locked sbom

demo: .venv/installed
	$(BIN)/repaconv demo

test: .venv/installed-dev lint
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS)

# Algebra, folds of each method, export, verification and the command line: for machines on which the whole suite does not
# run, e.g. arm64.
QUICK := $(addprefix tests/test_,affine_maps.py checkpoint_reader.py cli.py dwconv.py export_options.py fold_onnx.py \
lora.py low_rank_products.py nondeep.py output_comparison.py previous_schema_version.py pyra.py repavit.py repconv.py \
riformer.py verification_metrics_and_inputs.py)
test-quick: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) $(QUICK)

# The quick tests with the lowest version that pyproject.toml allows of each package that it names, on the lowest Python:
# LOWEST_PYTHON is its name or path. pip has no such choice; uv does. torch comes with CUDA, 5 GB,
# unless UV_TORCH_BACKEND=cpu.
test-lowest: build/supply/installed
	build/supply/bin/uv venv --quiet --clear --python $(or $(LOWEST_PYTHON),3.10) build/lowest
	VIRTUAL_ENV=build/lowest build/supply/bin/uv pip install --quiet --resolution lowest-direct -e ".[dev]"
	OMP_NUM_THREADS=1 build/lowest/bin/pytest $(WORKERS) $(QUICK)

test-slow: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/pytest $(WORKERS) -m slow

# What the commands give today against tests/data/golden (CONTRIBUTING, "Golden records"). ONLY: sections.
golden: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden.py --check $(if $(ONLY),--only $(ONLY))

golden-write: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python tests/golden.py --write $(if $(ONLY),--only $(ONLY))

# The recipes that are installed with repaconv, as far as their weights can be made here. Cached steps are not repeated.
recipes: .venv/installed
	$(BIN)/python benchmarks/recipes.py

# Names of files and classes that are spelled the British way.
NAMES := artefact,artefacts,licence,licences,recognising
lint: .venv/installed-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/mypy --config-file benchmarks/mypy.ini
	$(BIN)/codespell
	$(BIN)/codespell --builtin clear,en-GB_to_en-US -L $(NAMES) -S docs/reference,*.svg README.md CONTRIBUTING.md docs examples

arm: .venv/installed-dev
	$(BIN)/python tests/arm64_emulation.py .arm

docker-steps:
	$(PYTHON) tests/docker_steps.py .docker-steps

# Rows go to benchmarks/results/competing_toolchains_methods.jsonl; an interrupted run resumes. ROWS: names, see `--list`.
bench-competitors: .venv/installed-dev
	PYTHONPATH=benchmarks OMP_NUM_THREADS=$(or $(THREADS),1) $(BIN)/python -m competing_toolchains $(if $(ROWS),--rows $(ROWS)) \
	--batch $(or $(BATCH),1) --threads $(or $(THREADS),1) --budget $(or $(BUDGET),60) $(if $(SECONDS),--seconds $(SECONDS))

# The same for arbitrary networks, for which timm and others must be installed; INT8=1 after FP32; BATCH=8 THREADS=2.
bench-competitors-arbitrary: .venv/installed-dev
	PYTHONPATH=benchmarks OMP_NUM_THREADS=$(or $(THREADS),1) $(BIN)/python -m competing_toolchains --originals $(if $(INT8),--int8) \
	--batch $(or $(BATCH),1) --threads $(or $(THREADS),1) $(if $(ROWS),--rows $(ROWS)) --budget $(or $(BUDGET),60) --session-loads-seconds 20 $(if $(SECONDS),--seconds $(SECONDS))

bench-manual-baseline: .venv/installed
	$(BIN)/python benchmarks/manual_baseline_speed.py --batch 1 8 32 --threads 1 2 --rounds 45 --other-rounds 6 --vit-large-batch 1 -o $(CURDIR)/benchmarks/results/manual_baseline_speed.json

bench-convert-digits: .venv/installed-dev
	$(BIN)/python benchmarks/convert_digits.py -o benchmarks/results/convert_digits.json --page docs/convert.md
	$(BIN)/python benchmarks/finetune_digits.py -o benchmarks/results/finetune_digits.json --page docs/finetune.md
	$(BIN)/python benchmarks/score_command_cost.py -o benchmarks/results/score_command_cost.json

# Rows go to benchmarks/results/convert_textures.jsonl; an interrupted run resumes. QUICK=1 is a short run of every step.
bench-convert-textures: .venv/installed
	PYTHONPATH=benchmarks/train $(BIN)/python benchmarks/convert_textures.py $(if $(QUICK),--quick)
	$(if $(QUICK),,$(BIN)/python benchmarks/convert_textures_page.py)

bench-estimate: .venv/installed
	$(BIN)/python benchmarks/estimate_error.py -o benchmarks/results/estimate_error.json --page docs/estimate-accuracy.md

bench-pytorch: .venv/installed
	$(BIN)/python benchmarks/pytorch_vs_onnxruntime.py -o benchmarks/results/pytorch_vs_onnxruntime.json --page docs/benchmarks.md

bench-riformer-graphs: .venv/installed
	$(BIN)/python benchmarks/riformer_equivalent_graphs.py -o benchmarks/results/riformer_equivalent_graphs.json

# For a CPU ISA level without measurements: the source of its line in [measured] of a target.
bench-presets: .venv/installed
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks $(BIN)/python benchmarks/preset_speed.py --int8 -o benchmarks/results/preset_speed.json

bench-fold: .venv/installed
	$(BIN)/python benchmarks/fold_large.py -o benchmarks/results/fold_large.json

bench-statistical-power: .venv/installed
	$(BIN)/python benchmarks/statistical_power.py $(if $(QUICK),--quick) --page docs/measurement.md -o benchmarks/results/statistical_power.json

bench-profile: .venv/installed
	$(BIN)/python benchmarks/profile_totals.py -o $(CURDIR)/benchmarks/results/profile_totals.json

# Rows go to benchmarks/results/roofline.jsonl and docs/roofline.md. ROWS: names of networks; MODELS: ONNX files.
bench-roofline: .venv/installed-dev
	PYTHONPATH=benchmarks OMP_NUM_THREADS=1 $(BIN)/python benchmarks/roofline.py $(if $(ROWS),--rows $(ROWS)) \
	$(if $(MODELS),--models $(MODELS))

bench-export: .venv/installed
	$(BIN)/python benchmarks/export_huge.py -o benchmarks/results/export_huge.json

# Each call continues the exhaustive search for SLICE seconds.
bench-tuner: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/tuner_vs_exhaustive_search.py $(if $(NET),--net $(NET)) --budget $(or $(BUDGET),600) \
	--slice $(or $(SLICE),3600) -o $(CURDIR)/benchmarks/results/tuner_vs_exhaustive_search.json

bench-gate: .venv/installed
	$(BIN)/python benchmarks/gate_false_alarms.py -o benchmarks/results/gate_false_alarms.json
	$(BIN)/python benchmarks/verify_command_cost.py -o benchmarks/results/verify_command_cost.json

# Throughput of one stream per core against one stream, and the limit that the cores set.
bench-throughput: .venv/installed-dev
	PYTHONPATH=benchmarks $(BIN)/python benchmarks/throughput.py -o benchmarks/results/throughput.json --page docs/measurement.md

# Speedup of padded channels on this CPU.
bench-channel-padding: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/channel_padding.py -o benchmarks/results/channel_padding.json

# Speedup of the rewrites for slow kernels of ONNX Runtime on this CPU.
bench-slow-kernels: .venv/installed-dev
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/slow_onnxruntime_kernels.py -o benchmarks/results/slow_onnxruntime_kernels.json

# Speedup of a fixed batch size on this CPU. Needs timm and OpenVINO.
bench-fixed-batch: .venv/installed
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/fixed_batch_size.py -o benchmarks/results/fixed_batch_size.json

bench-rewrite: .venv/installed
	OMP_NUM_THREADS=1 PYTHONPATH=benchmarks $(BIN)/python benchmarks/without_one_rewrite.py $(or $(REWRITE),channels-last-as-tokens) -o benchmarks/results/without_one_rewrite.json

bench-zoo: .venv/installed
	$(BIN)/python benchmarks/zoo.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SPEED),--speed) $(if $(COST),--cost)
	$(BIN)/python benchmarks/zoo_table.py

bench-tasks: .venv/installed
	$(BIN)/python benchmarks/task_zoo.py $(if $(SECONDS),--seconds $(SECONDS)) $(if $(SPEED),--speed)
	$(BIN)/python benchmarks/zoo_table.py

bench-task-tolerances: .venv/installed
	$(BIN)/python benchmarks/train/shapes.py -o build/shapes --steps 1200 --count 3000
	$(BIN)/python benchmarks/train/shape_networks.py -o build/shapes --steps 800
	$(BIN)/python benchmarks/task_tolerances.py build/shapes -o benchmarks/results/task_tolerances.jsonl

bench-reparameterized: .venv/installed
	$(BIN)/python benchmarks/reparameterized_networks.py $(if $(SECONDS),--seconds $(SECONDS))

bench-ultralytics: .venv/installed
	$(BIN)/python benchmarks/ultralytics_files.py $(VERSIONS:%=--versions %) $(if $(SECONDS),--seconds $(SECONDS))

bench-precision: .venv/installed-dev
	$(BIN)/python benchmarks/lower_precision.py -o benchmarks/results/lower_precision.json

bench-precision-tolerances: .venv/installed-dev
	$(BIN)/python benchmarks/lower_precision_tolerances.py -o benchmarks/results/lower_precision_tolerances.json

# A kit that measures on an NVIDIA GPU elsewhere (docs/gpu.md), and the evaluation of its result.
gpu-kit: .venv/installed
	PYTHONPATH=benchmarks $(BIN)/python -m gpu.kit build/gpu-kit --python $(or $(KIT_PYTHON),3.12)

gpu-results: .venv/installed
	PYTHONPATH=benchmarks $(BIN)/python -m gpu.result_evaluation $(RESULT) --kit $(or $(KIT),build/gpu-kit/kit.json)

# The kit in a folder with only a Python, torch and NumPy, without network access, as on the GPU machine.
gpu-bare: .venv/installed
	PYTHONPATH=benchmarks $(BIN)/python tests/gpu_kit_bare_machine.py build/gpu-bare $(BARE_PYTHON)

docs: .venv/installed-dev
	$(PIP) -e ".[docs]"
	$(BIN)/python docs/_reference.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

# Hostile and damaged input, an hour; an interrupted run resumes.
torture: .venv/installed-dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m torture .torture

# Faults planted into the folds, which the verification of each fold must catch; half an hour.
mutants: .venv/installed-dev
	PYTHONPATH=tests OMP_NUM_THREADS=1 $(BIN)/python -m torture.fold_mutants .mutants

# A hundred mutants of arguments, conditions, numbers and terms, in all code that writes a network.
code-mutants: .venv/installed-dev
	PYTHONPATH=tests:benchmarks OMP_NUM_THREADS=1 $(BIN)/python -m torture.code_mutants .code-mutants

# What CI's machine installs, each file with its hashes: Python 3.11, Linux x86_64, torch's CPU build where pip finds it.
lock: build/supply/installed
	printf 'hatchling>=1.25\neditables\n' | UV_FIND_LINKS="$${UV_FIND_LINKS-$$PIP_FIND_LINKS}" build/supply/bin/uv \
	pip compile --quiet pyproject.toml - --extra dev -c constraints.txt --generate-hashes -o requirements.lock \
	--python-version 3.11 --python-platform x86_64-manylinux_2_28 --custom-compile-command "make lock"

# Instead of `make .venv/installed-dev`: nothing comes in whose hash is not in requirements.lock.
locked:
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes --only-binary :all: -r requirements.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	touch .venv/installed .venv/installed-dev

# The parts that repaconv is made of at run time: build/sbom.json, and docs/licenses.md.
sbom: .venv/installed build/supply/installed
	build/supply/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible \
	-o build/installed.json .venv/bin/python
	$(BIN)/python docs/_licenses.py build/installed.json build/sbom.json docs/licenses.md

# Whether a version is the one of the package, of the citation and of the changelog, and has its date.
release-check:
	grep -qx 'version = "$(VERSION)"' pyproject.toml
	grep -qx 'version: $(VERSION)' CITATION.cff
	grep -q '^## \[$(VERSION)\] - 20[0-9][0-9]-' CHANGELOG.md

# dist/: source archive and wheel, built twice with equal bytes.
dist: build/supply/installed
	rm -rf dist build/dist-again
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) build/supply/bin/uv build --quiet -o dist
	SOURCE_DATE_EPOCH=$$(git log -1 --format=%ct) build/supply/bin/uv build --quiet -o build/dist-again
	cd dist && for file in *; do cmp $$file ../build/dist-again/$$file || exit 1; done
	build/supply/bin/twine check --strict dist/*

train: .venv/installed-dev
	$(BIN)/python benchmarks/train/digits.py
	$(BIN)/python benchmarks/train/train.py

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(PIP) -e .
	touch $@

.venv/installed-dev: .venv/installed
	$(PIP) -e ".[dev]"
	[ "$$(uname -sm)" != "Linux x86_64" ] || $(PIP) --no-deps $(TRT_RTX) || echo "no TensorRT-RTX: its tests are skipped"
	touch $@

build/supply/installed:
	$(PYTHON) -m venv build/supply
	build/supply/bin/pip install --quiet --disable-pip-version-check uv==0.13.9 cyclonedx-bom==7.5.0 twine==7.0.0
	touch $@

clean:
	rm -rf .venv .torture .mutants .code-mutants .arm build/supply build/gpu-kit build/gpu-bare build/dist-again dist .docker-steps demo-out
