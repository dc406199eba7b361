# Every target sets up what it needs, on a machine with Python 3 (>= 3.10, with venv), make and git.
# Set-up is repeated only when pyproject.toml or its constraints change; "rm -rf .venv" starts afresh.

PYTHON ?= python3
WORKERS ?= 2
VENV := .venv
PY := $(VENV)/bin/python
INSTALL := $(PY) -m pip install --disable-pip-version-check -c constraints.txt
REQUIREMENTS := pyproject.toml constraints.txt
# Tests of one number of ranks are a group: one worker runs them.
PYTEST := -m pytest -n $(WORKERS) --dist loadgroup
CORE := $(PYTEST) -m "not slow" $(addprefix tests/,statistics kernels model probes trainer integration sinks)
LOWEST := .venv-lowest
NEWEST := .venv-newest
WHEEL := .venv-wheel
DEPENDENCIES ?= newest
CONSTRAINTS_pinned := -c constraints.txt
CONSTRAINTS_lowest := -c constraints-lowest.txt
INSTALL_WHEEL = $(WHEEL)/bin/python -m pip install --disable-pip-version-check $(CONSTRAINTS_$(DEPENDENCIES))
# Each version of numba has a cache of its own: it writes the new index before the new code, so a second process may read the old version's code.
NUMBA_CACHE := NUMBA_CACHE_DIR=$(CURDIR)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo rcc test test-slow test-all record-trainings verdicts public-names released-files test-pytorch-lightning test-lowest test-newest test-wheel test-health test-triton test-deepspeed check docs release bench gpu dev clean

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/make \1@\2/p' Makefile | tr '@' '\t'

demo: $(VENV)/examples.stamp ## train a small network on the digits data set and show what was monitored
	$(PY) examples/digits.py fit --config configs/digits.yaml
	$(VENV)/bin/lightning-module-monitor summary demo_output

rcc: $(VENV)/examples.stamp ## check how what a network learns depends on its width: the standard parametrization against muP
	$(PY) examples/coordinate_check.py

test: $(VENV)/dev.stamp ## run the tests that are quick (WORKERS=2 processes): less than six minutes on two cores
	OMP_NUM_THREADS=1 $(PY) $(PYTEST) -m "not slow"
	@echo "Slow tests were left out, as of tutorials, the site, releases and benchmarks, and most cases of large matrices: make test-all"

test-slow: $(VENV)/dev.stamp ## run the slow tests alone
	OMP_NUM_THREADS=1 $(PY) $(PYTEST) -m slow

test-all: test test-slow ## run all tests

test-pytorch-lightning: $(VENV)/dev.stamp ## run the tests of whole runs, on one and on two ranks, with the package pytorch_lightning
	LIGHTNING_PACKAGE=pytorch_lightning OMP_NUM_THREADS=1 $(PY) $(PYTEST) -m "not slow" tests/integration tests/trainer tests/sinks/test_loggers.py tests/sinks/test_charts.py tests/report/test_report.py tests/distributed/test_ddp.py tests/distributed/test_launchers.py

test-lowest: $(LOWEST)/core.stamp ## test the core with the lowest versions that pyproject.toml allows; needs Python 3.10, 3.11 or 3.12
	$(NUMBA_CACHE)/$(LOWEST)/numba OMP_NUM_THREADS=1 $(LOWEST)/bin/python $(CORE)

test-newest: ## test the core with the newest versions that there are
	$(PYTHON) -m venv $(NEWEST)
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --upgrade --upgrade-strategy eager -e '.[test-core]'
	$(NEWEST)/bin/python -m pip install --disable-pip-version-check --upgrade --no-deps mup
	$(NUMBA_CACHE)/$(NEWEST)/numba OMP_NUM_THREADS=1 $(NEWEST)/bin/python $(CORE)

test-wheel: $(VENV)/dev.stamp ## test the wheel alone and with its extras in an empty environment; also PYTHON=python3.13 or DEPENDENCIES=lowest, pinned
	rm -rf $(WHEEL) build/wheel
	$(PY) -m build --wheel --outdir build/wheel
	$(PYTHON) -m venv $(WHEEL)
	$(INSTALL_WHEEL) build/wheel/*.whl
	WHEEL_PYTHON=$(WHEEL)/bin/python $(PY) -m pytest tests/release/test_wheel.py
	$(INSTALL_WHEEL) "$$(echo build/wheel/*.whl)[examples,fast,pandas,parquet,xarray]"
	WHEEL_PYTHON=$(WHEEL)/bin/python $(PY) -m pytest tests/release/test_wheel.py

test-health: $(VENV)/dev.stamp ## test the verdict on small trainings, sick and healthy, with three seeds
	HEALTH_SEEDS=0,1,2 OMP_NUM_THREADS=1 $(PY) $(PYTEST) tests/health/test_verdicts.py

record-trainings: $(VENV)/dev.stamp ## record the stores of these trainings for the tests, and write the table of verdicts; after a change of what is recorded
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -m helpers.all_trainings

verdicts: $(VENV)/dev.stamp ## write the table of verdicts on the stores of these trainings; after a change of verdicts
	OMP_NUM_THREADS=1 PYTHONPATH=tests $(PY) -m helpers.all_trainings --verdicts

public-names: $(VENV)/dev.stamp ## write the list of what is public, with each release
	PYTHONPATH=tests $(PY) -m helpers.public_names

released-files: $(VENV)/dev.stamp ## write the files that all later versions must read, with each release
	PYTHONPATH=tests $(PY) -m helpers.released_files

test-triton: $(VENV)/triton.stamp ## test the Triton kernel without a GPU: interpreted on the CPU, and compiled for GPUs
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(PY) $(PYTEST) tests/kernels/test_triton_kernel.py tests/kernels/test_triton_launches.py
	OMP_NUM_THREADS=1 $(PY) $(PYTEST) tests/kernels/test_triton_compile.py

test-deepspeed: $(VENV)/deepspeed.stamp ## test DeepSpeed on CPUs, in one to four processes: six minutes, of which its import takes most
	OMP_NUM_THREADS=1 $(PY) $(PYTEST) tests/distributed/test_deepspeed.py

check: $(VENV)/dev.stamp ## format, lint, types, import rules, spelling, schemas of workflows and citation
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports
	$(PY) -m codespell_lib
	$(PY) -m check_jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml
	$(PY) -m check_jsonschema --builtin-schema vendor.github-issue-forms $(filter-out %/config.yml,$(wildcard .github/ISSUE_TEMPLATE/*.yml))
	$(PY) -m check_jsonschema --builtin-schema vendor.github-issue-config .github/ISSUE_TEMPLATE/config.yml
	$(PY) -m check_jsonschema --builtin-schema vendor.citation-file-format CITATION.cff

docs: $(VENV)/docs.stamp ## build the site into build/site, without a network; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(PY) -m mkdocs build --strict --quiet
	@echo "build/site/index.html; with search: $(PY) -m http.server --directory build/site"

release: $(VENV)/dev.stamp ## build wheel and sdist into dist, and check them
	rm -rf dist
	$(PY) -m build
	$(PY) -m twine check --strict dist/*

bench: $(VENV)/bench.stamp ## measure the overhead of monitoring
	$(PY) benchmarks/overhead.py

gpu: $(VENV)/dev.stamp $(VENV)/bench.stamp ## all that only a GPU can show, in less than eight minutes: its tests, the Triton kernels, what the callback costs
	$(PY) benchmarks/on_gpu.py

dev: $(VENV)/dev.stamp ## only set up .venv for development

clean: ## remove caches, build results and run outputs; the environments stay
	rm -rf build dist src/*.egg-info demo_output lightning_logs mlruns wandb htmlcov .coverage .coverage.*
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find src tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

# torch comes first and alone: everything after it then finds the build that suits this machine in place.
$(VENV)/torch.stamp: $(REQUIREMENTS)
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) torch
	@touch $@

$(VENV)/examples.stamp: $(VENV)/torch.stamp
	$(INSTALL) -e '.[examples]'
	@touch $@

$(VENV)/docs.stamp: $(VENV)/torch.stamp
	$(INSTALL) -e '.[docs]'
	@touch $@

# mup alone: it asks for torchvision, pandas and seaborn, which only its plots and examples use. Of what it imports, dev has all.
$(VENV)/dev.stamp: $(VENV)/torch.stamp
	$(INSTALL) -e '.[dev]'
	$(INSTALL) --no-deps mup
	@touch $@

$(VENV)/triton.stamp: $(VENV)/dev.stamp
	$(INSTALL) -e '.[triton]'
	@touch $@

$(LOWEST)/core.stamp: pyproject.toml constraints-lowest.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info >= (3, 13))' || { \
	    echo "The lowest torch has no wheels for $$($(PYTHON) --version); choose an older one: make $(MAKECMDGOALS) PYTHON=python3.12"; exit 1; }
	$(PYTHON) -m venv $(LOWEST)
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check -c constraints-lowest.txt -e '.[test-core]'
	$(LOWEST)/bin/python -m pip install --disable-pip-version-check -c constraints-lowest.txt --no-deps mup
	@touch $@

# From source, with the torch that is there, and without its compiled operations.
$(VENV)/deepspeed.stamp: $(VENV)/dev.stamp
	DS_BUILD_OPS=0 $(INSTALL) --no-build-isolation -e '.[deepspeed]'
	@touch $@

$(VENV)/bench.stamp: $(VENV)/torch.stamp
	$(INSTALL) -e '.[bench]'
	@touch $@
