# Needs Python >= 3.11, make, and a network with PyPI; everything else is installed into .venv.
# Tests that need a certain machine also run where all that is there, without a network: make test-gpu PYTHON=python3
# Another torch, without lint and in an environment of its own: make check TORCH=2.8.0 PYTHON=python3.12
PYTHON ?= python3
VENV := .venv$(TORCH:%=-torch-%)
CONSTRAINTS := $(if $(TORCH),$(VENV)/)constraints.txt
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
INTERPRETER := $(VENV)/.interpreter
ifeq ($(origin PYTHON)$(TORCH),command line)
TESTER := $(PYTHON)
READY :=
else
TESTER := $(BIN)/python
READY := $(INSTALLED)
endif
LINT := $(if $(TORCH),$(INSTALLED),lint)
# Two processes for the tests: each imports torch, and the machines this runs on may be small.
WORKERS ?= 2
GPU_WORKERS ?= 4
PYTEST := $(BIN)/python -m pytest -q
# One arithmetic thread each: two processes with as many threads as cores wait for each other most of the time.
# And bytecode, even where the environment wants none written: else each process of the tests compiles volseg anew.
ONE_THREAD := OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=
# A file's tests share fixtures and processes. In the order of their names: else files of few tests come last, which are
# those of whole trainings, and one worker waits for the other.
SHARED_OUT := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
CODE := volseg tests workflows docker docs/site
# What is quick: a folder per part of volseg.
UNIT := $(filter-out tests/docs/ tests/equivalence/ tests/experiment/ tests/properties/ tests/regressions/,$(wildcard tests/*/)) $(wildcard tests/test_*.py)

# Tests that run on a CPU, as pytest chooses them by default. tests/long.txt lists those that take 1.5 seconds or longer.
CPU := not slow and not gpu and not multi_gpu and not image

.PHONY: tests/long.txt quickstart check test test-long test-all test-gpu test-kernels test-image viewer wheel lint format docs docs-text clean

quickstart: $(INSTALLED)
	$(BIN)/volseg quickstart

check: $(LINT)
	$(ONE_THREAD) $(PYTEST) $(SHARED_OUT) -m "$(CPU) and not long" $(UNIT)

test: $(LINT)
	$(ONE_THREAD) $(PYTEST) $(SHARED_OUT) -m "$(CPU) and not long"

test-long: $(INSTALLED)
	$(ONE_THREAD) $(PYTEST) $(SHARED_OUT) -m "$(CPU) and long"

# Measures all tests on this machine, which should be idle. The checks of the sources (tests/test_*.py) are never listed.
tests/long.txt: $(INSTALLED)
	$(ONE_THREAD) $(PYTEST) $(SHARED_OUT) --durations=0 --durations-min=1.5 | sed -nE 's|^([0-9.]+)s call +(tests/[a-z]+/.*)|\1 \2|p' > $@.new
	mv $@.new $@

test-all: $(LINT)
	$(ONE_THREAD) $(PYTEST) $(SHARED_OUT) --hypothesis-profile random -m "not gpu and not multi_gpu and not image"

# The files of tests that name a marker: the others would be imported for nothing.
naming = $$(grep -rlwE '$(1)' tests --include='test_*.py')

test-gpu: $(READY)
	$(TESTER) -c 'import sys, torch; n = torch.cuda.device_count(); print(n, "GPUs, torch", torch.__version__); sys.exit(not n)'
	$(TESTER) -m pytest -q -n $(GPU_WORKERS) --dist loadfile -m gpu $(call naming,mark\.gpu|with_kernels)
	$(TESTER) -m pytest -q -m multi_gpu $(call naming,mark\.multi_gpu)

# Triton's kernels without a GPU, by its interpreter.
test-kernels: $(if $(READY),$(INTERPRETER))
	$(ONE_THREAD) TRITON_INTERPRET=1 $(TESTER) -m pytest -q -n $(WORKERS) -m kernels $(call naming,mark\.kernels|with_kernels)

# What `volseg view` puts into its pages: NiiVue, fetched by npm and compared with its SHA-512. Wheels built here hold it.
NIIVUE := 0.69.0
NIIVUE_SHA512 := 60c8d0bc9803d56d9bec3ba8c64c250b85716eb80878f449e6ac90cd72b18b6bf6301560dbce4ffc2210ca0e3aa030c60c871a3656ddf8c86d3bf79d31b5c990
viewer:
	rm -rf build/niivue && mkdir -p build/niivue
	cd build/niivue && npm pack --ignore-scripts @niivue/niivue@$(NIIVUE)
	cd build/niivue && mv *.tgz package.tgz && echo "$(NIIVUE_SHA512)  package.tgz" | sha512sum --check
	tar -xzf build/niivue/package.tgz -C build/niivue package/dist/niivue.umd.js
	(echo "/*! @niivue/niivue $(NIIVUE), BSD-2-Clause"; echo; cat volseg/reporting/niivue.LICENSE; echo "*/"; \
		cat build/niivue/package/dist/niivue.umd.js) > build/niivue/niivue.js
	mv build/niivue/niivue.js volseg/reporting/niivue.js

# Built, installed into an environment of its own, and used from an empty folder.
wheel: $(INSTALLED)
	test -f volseg/reporting/niivue.js || $(MAKE) viewer || echo "a wheel without what volseg view needs"
	$(BIN)/python tests/try_wheel.py --types

# Builds docker/Dockerfile without Docker and trains in it; needs Linux, root, buildah and mmdebstrap, else it skips.
test-image: $(INSTALLED)
	$(PYTEST) -s -m image tests/docker

# A site in build/docs; a warning is an error. Its makers announce their next products at every build.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict -f docs/site/mkdocs.yml

# The generated parts of pages: references of commands, config and Python, and tables that follow from the code.
docs-text: $(INSTALLED)
	$(BIN)/python docs/site/generated_text.py

lint: $(INSTALLED)
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/ruff check --preview --select PLW1514 $(CODE) # text in the encoding of the locale
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell volseg workflows docs configs datasets docker *.md
	$(BIN)/hadolint docker/Dockerfile

format: $(INSTALLED)
	$(BIN)/ruff format $(CODE)
	$(BIN)/ruff check --fix $(CODE)

$(INSTALLED): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "volseg needs Python >= 3.11, this is " + sys.version)'
	test -d $(VENV) || $(PYTHON) -m venv $(VENV)
	$(if $(TORCH),sed -E 's/^torch==[^ ]+/torch==$(TORCH)/; /^triton==/d' constraints.txt > $(CONSTRAINTS))
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) torch
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[dev,docs]'
	touch $@

$(INTERPRETER): $(INSTALLED)
	$(BIN)/python -m pip install -q -c $(CONSTRAINTS) -e '.[interpreter]'
	touch $@

clean:
	rm -rf $(VENV) .pytest_cache .hypothesis .mypy_cache .ruff_cache
