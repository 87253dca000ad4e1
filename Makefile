# Each target works alone on a fresh clone: it makes .venv and installs what it needs.
PYTHON ?= python3
CONSTRAINTS ?= constraints.txt
PROMPT ?= Explain in two sentences what a GPU is.
PY := .venv/bin/python
READY := .venv/.ready

.PHONY: run test lint types compile bench clean

run: $(READY)  ## generate text with a real model, every attention call served by hal
	$(PY) -m hal generate "$(PROMPT)" --stats

test: $(READY)  ## unit tests, then the conformance suite on both built-in backends
	$(PY) -m pytest -q tests --ignore tests/kernels
	TRITON_INTERPRET=1 $(PY) -m pytest -q tests/kernels
	$(PY) -m hal conformance --backend reference
	TRITON_INTERPRET=1 $(PY) -m hal conformance --backend triton

lint: $(READY)
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .

types: $(READY)
	$(PY) -m mypy .

compile: $(READY)  ## every (kernel, dtype) ahead of time for sm_80, sm_90 and gfx942
	$(PY) tests/aot/compile_kernels.py

bench: $(READY)  ## cost of a dispatched call over a direct one
	$(PY) tests/bench/overhead.py --check

$(READY): pyproject.toml $(CONSTRAINTS)
	test -x $(PY) || $(PYTHON) -m venv .venv
	$(PY) -m pip install -q --upgrade pip "setuptools>=77"
	PYTHONWARNINGS=ignore $(PY) -m pip install -q -c $(CONSTRAINTS) -e ".[triton,transformers,dev]"
	touch $@

clean:
	rm -rf .venv build *.egg-info
