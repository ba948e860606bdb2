# make demo     install Shoal in .venv and run the main example
# make test     install Shoal in .venv and run the tests, JOBS at a time
# make check    check lint rules, formatting and types
# make bench    run the short benchmarks
# make web      build the page of shoal serve; needs npm (the built page is part of the repository)
# make format   fix lint errors and format the code
# make setup    only install; make clean removes the installation and caches

PYTHON ?= python3
JOBS   ?= 4
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: setup demo test check bench web format clean

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("Shoal needs Python 3.11 or later; set PYTHON=…")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --constraint constraints.txt --editable ".[dev]"
	@touch $(READY)

demo: $(READY)
	$(BIN)/shoal run examples/quickstart.toml --plot

test: $(READY)
	@$(BIN)/python -m compileall -q src  # tests start hundreds of processes, also where Python writes no bytecode
	$(BIN)/pytest -n $(JOBS) --dist loadfile --no-loadscope-reorder

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(READY)
	$(BIN)/python benchmarks/run.py --short

web:
	cd web && npm ci --no-audit --no-fund && npm run check && npm run build

format: $(READY)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis
