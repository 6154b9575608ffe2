# `make demo` and `make test` do all their own set-up. On a machine that has its own torch,
# name its interpreter instead of making an environment: `make gpu-test PY=python3`.
PYTHON ?= python3
VENV := .venv
PY ?= $(VENV)/bin/python
JOBS ?= 2
TORCH := torch==2.13.0
READY := $(VENV)/.ready
STUB_SOURCES := setup.py pyproject.toml torch_ext/culax/schemas.txt $(wildcard csrc_stub/*)

.DEFAULT_GOAL := help
.PHONY: help env demo doctor test lint types unit gpu-test gpu-sanitize ptx-all kernels bench clean

help:  ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*##/\t/' | expand -t 14

env: $(READY)  ## make the environment in .venv

$(READY): $(STUB_SOURCES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "culax needs Python 3.10 or newer")'
	test -x $(VENV)/bin/python || $(PYTHON) -m venv $(VENV)
	$(VENV)/bin/python -m pip install --progress-bar off -q --no-compile 'setuptools>=77' wheel
	$(VENV)/bin/python -m pip install --progress-bar off -q --no-compile '$(TORCH)'
	$(VENV)/bin/python -m pip install --progress-bar off -q --no-compile --no-build-isolation '$(TORCH)' -e '.[dev,kernels]'
	touch $@

demo: env  ## check every op on this machine, then train a tiny language model
	$(PY) -m culax
	$(PY) examples/train_tiny_lm.py

doctor: env  ## what runs on this machine, checked against float64
	$(PY) -m culax

test: lint types unit  ## lint, type check, tests

lint: env  ## ruff
	$(PY) -m ruff check .

types: env  ## mypy
	$(PY) -m mypy

unit: env  ## the tests (GPU tests run where a GPU is)
	OMP_NUM_THREADS=1 $(PY) -m pytest -n $(JOBS) --dist loadfile

gpu-test:  ## the GPU tests, with PY's torch; records what passed in tests/gpu/verified.json
	PYTHONPATH=torch_ext $(PY) -m tests.gpu.record

gpu-sanitize:  ## compute-sanitizer over small tests of every kernel, with PY's torch
	PYTHONPATH=torch_ext $(PY) -m tests.gpu.sanitize

ptx-all: env  ## check the compiled code of every kernel variant
	$(PY) -m pytest tests/ptx --ptx-all -n $(JOBS) --dist worksteal

kernels: env  ## build the SM90 kernels ahead of time
	$(PY) -m culax build --arch sm_90a

bench: env  ## the benchmark cases this machine can run
	$(PY) -m benchmarks.run

clean:  ## remove the environment and everything built
	rm -rf $(VENV) build dist torch_ext/culax/_aot torch_ext/culax/_stub*.so torch_ext/*.egg-info
