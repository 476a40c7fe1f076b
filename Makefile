# Each target does its own set-up in .venv; none needs anything but Python 3.11 to 3.13,
# make and a C++ compiler.
#
#   make demo    install, then write a long text with the bundled model
#   make test    install what tests need, then run them all
#   make lint    ruff and mypy
#   make clean   remove .venv and everything built

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TOKENS ?= 4000

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt  # reaches isolated builds too

.PHONY: demo test lint clean

demo: $(VENV)/.installed
	$(BIN)/longdraft generate --prompt-file examples/chapter.txt --max-new-tokens $(TOKENS) --seed 7 \
	    --min-p 0.1 --repetition-penalty 1.2 --penalty-window 1024

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses auto

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "longdraft needs Python 3.11 to 3.13; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(PIP) --editable '.[dev]'
	touch $@ $(VENV)/.installed
