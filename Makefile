# Everything needs Linux, make and Python 3.10 or later; the rest is installed into a virtual environment.
#
#   make verify                 the built-in passes on real gloo process groups; more options in VERIFY_OPTIONS
#   make test                   the tests; more options in PYTEST_OPTIONS
#   make quick                  those that what has changed since the last commit reaches, nearest first, for a minute
#   make gallery                pages of all known classes of defects, and of those found in PyTorch: reports/{gallery,pytorch}/index.html
#   make docs                   the documentation as a site: site/index.html
#   make gpu                    all that needs a CUDA device, with a Python that has torch for it: GPU_PYTHON; results in gpu-results/
#   make lint                   ruff, mypy, import-linter, and the length of files
#   make dist                   source archive and wheel in dist/; the wheel is installed elsewhere and verifies a pass there
#   TORCH=2.11.0 make test      with another torch, in a virtual environment of its own: a version or any pip requirement
#   PYTHON=python3.12 make ...  with another Python (remove the virtual environment first)

PYTHON ?= python3
GPU_PYTHON ?= $(PYTHON)
VERIFY_OPTIONS ?= --max-examples 60
PYTEST_OPTIONS ?= -n auto

ifeq ($(origin TORCH),undefined)
VENV ?= .venv
else
VENV ?= .venv-$(shell printf '%s' '$(TORCH)' | tr -c 'A-Za-z0-9.+-' '_')
endif
TORCH ?= 2.13.0

export PIP_DISABLE_PIP_VERSION_CHECK = 1
# Bytecode is kept: without it each of the many processes of the tests compiles what it imports.
unexport PYTHONDONTWRITEBYTECODE
BIN := $(VENV)/bin

.DEFAULT_GOAL := help
.PHONY: help verify test quick gallery docs gpu lint dist clean
.DELETE_ON_ERROR:

help:
	@sed -n 's/^#   //p' Makefile

verify: $(VENV)/.test
	$(BIN)/tcverify run $(VERIFY_OPTIONS)

test: $(VENV)/.test
	$(BIN)/python -m pytest $(PYTEST_OPTIONS)

quick: $(VENV)/.test
	$(BIN)/python -m tests.quick $(QUICK_OPTIONS)

gallery: $(VENV)/.test
	$(BIN)/tcverify show reports/gallery --format html > reports/gallery/index.html
	$(BIN)/tcverify show reports/pytorch --format html > reports/pytorch/index.html
	@echo "written: reports/gallery/index.html, reports/pytorch/index.html"

docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "written: site/index.html"

# No virtual environment: machines with a device come with the torch that fits it.
gpu:
	@$(GPU_PYTHON) -c 'import torch, hypothesis, jinja2, click, rich, pytest, xdist, pytest_timeout' || { \
		echo "error: $(GPU_PYTHON) cannot run tcverify and its tests" >&2; \
		echo "  hint: name a Python that has torch for CUDA, e.g. GPU_PYTHON=/opt/venv/bin/python make gpu;" >&2; \
		echo "        what else is missing: pip install -e '.[test]'" >&2; \
		exit 1; }
	$(GPU_PYTHON) benchmarks/gpu.py $(GPU_OPTIONS)

# Every check runs, so that one report shows all there is to mend.
lint: $(VENV)/.dev
	@status=0; \
	for check in "ruff check" "ruff format --check" "mypy" "lint-imports" "python -m pytest -q tests/repository/test_layout.py::test_no_module_is_too_long"; do \
		echo "$$check"; \
		$(BIN)/$$check || status=1; \
	done; \
	exit $$status

# The archive holds no symbolic link, and the wheel is made of the archive: what works here works on any platform.
dist: $(VENV)/.dev
	rm -rf dist build
	$(BIN)/python -m build --outdir dist > /dev/null
	! tar -tvzf dist/*.tar.gz | grep '^l'
	@elsewhere=$$(mktemp -d) && trap 'rm -rf "$$elsewhere"' EXIT && wheel=$$(ls "$$PWD"/dist/*.whl) && \
	python=$$(cd "$$(dirname $(BIN)/python)" && pwd)/python && \
	$$python -m pip install --quiet --no-deps --target "$$elsewhere/site" "$$wheel" && cd "$$elsewhere" && \
	export PYTHONPATH="$$elsewhere/site" && \
	$$python -c 'import sys, tcverify.strategies as s; sys.exit(not s.__file__.startswith(sys.argv[1]))' "$$elsewhere" && \
	$$python -m tcverify run sequence_parallel --world-size 2 --max-examples 5 --seed 1 --confirm none
	@echo "written: $$(ls dist/*)"

clean:
	rm -rf .venv .venv-* .tox build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find tcverify tests -name __pycache__ -type d -prune -exec rm -rf {} +

$(VENV)/.python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "error: PYTHON=$(PYTHON) is missing or older than Python 3.10" >&2; \
		echo "  hint: name a newer one, e.g. PYTHON=/usr/bin/python3.12 make test" >&2; \
		exit 1; }
	@$(PYTHON) -m venv $(VENV) || { \
		echo "error: $(PYTHON) cannot make a virtual environment" >&2; \
		echo "  hint: install its venv module (Debian and Ubuntu: apt install python3-venv)" >&2; \
		exit 1; }
	@touch $@

# torch comes first and in a call of its own: an index that serves CPU builds may do so for an exact version only.
$(VENV)/.torch: $(VENV)/.python
	@case '$(TORCH)' in \
		[0-9]*) requirement='torch==$(TORCH)' ;; \
		[\<\>=!~]*) requirement='torch$(TORCH)' ;; \
		*) requirement='$(TORCH)' ;; \
	esac; \
	echo "installing $$requirement into $(VENV)"; \
	$(BIN)/python -m pip install --quiet "$$requirement"
	@touch $@

$(VENV)/.test: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.dev: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	@touch $@

$(VENV)/.docs: $(VENV)/.torch pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	@touch $@
