# Set-up is part of every target: `make demo` and `make test` work on a fresh machine with Python >= 3.11.

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
PINS := requirements-cpu.txt
# Name one to use it: make test PYTHON=/opt/python3.12/bin/python3
PYTHON ?=
PYTEST_ARGS ?=
# Test programs at once. Most tests keep one core busy; those of several ranks more.
JOBS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test check clean

help:
	@echo 'make demo    ranks on this machine run every op and check it'
	@echo 'make test    ruff, mypy and all tests that need no GPU (PYTEST_ARGS="-k name" to choose, JOBS=8 for more cores)'
	@echo 'make check   ruff and mypy alone'
	@echo 'make clean   remove $(VENV) and caches'
	@echo 'All of them set up $(VENV) first, once. PYTHON=... names the interpreter to make it with.'

demo: $(STAMP)
	$(BIN)/tileflux demo

test: check
	$(BIN)/python -m pytest -n $(JOBS) --dist worksteal $(PYTEST_ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/mypy

# A venv without a stamp was never finished, so it is made anew. With an old stamp (pins or pyproject.toml changed) it
# is brought up to date in place. The stamp goes first and comes back last: an interrupted install leaves none.
$(STAMP): $(PINS) pyproject.toml
	@set -e; \
	if [ -e $@ ] && $(BIN)/python -c '' 2>/dev/null; then rm $@; else \
	  found=; \
	  for candidate in $(or $(PYTHON),python3.11 python3.12 python3.13 python3); do \
	    if $$candidate -c 'import ensurepip, sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; \
	    then found=$$candidate; break; fi; \
	  done; \
	  if [ -z "$$found" ]; then \
	    echo 'No working Python >= 3.11 with venv and ensurepip among: $(or $(PYTHON),python3.11 python3.12 python3.13 python3).' >&2; \
	    echo 'Install one (Debian: apt-get install python3 python3-venv) or name it: make PYTHON=/path/to/python3' >&2; \
	    exit 1; \
	  fi; \
	  echo "Making $(VENV) with $$($$found --version), once"; \
	  rm -f $@; $$found -m venv --clear $(VENV); \
	fi
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -r $(PINS)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation -e .
	@touch $@

clean:
	rm -rf $(VENV) build *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find tileflux tests -name __pycache__ -type d -prune -exec rm -rf {} +
