# What a checkout can do. Every target sets itself up in .venv first, which is quick once done.

VENV := .venv
PY   := $(VENV)/bin/python
STAMP := $(VENV)/.installed
NATIVE := setup.py $(wildcard stage/backends/cpu/native/*)
comma := ,
EXTRAS := dev$(if $(wildcard /dev/nvidia0),$(comma)gpu)

.DEFAULT_GOAL := help
.PHONY: help venv model protos test check kernels sanitize demo

help:
	@echo 'make demo     a real model answers through a coordinator and two stage daemons'
	@echo 'make test     the whole test suite'
	@echo 'make check    ruff, mypy, import-linter'
	@echo 'make kernels  every CUDA kernel for every architecture, with registers and spills (minutes; no GPU needed)'
	@echo 'make venv     only install, into $(VENV)'
	@echo 'make model    only fetch the demo model'
	@echo 'make protos   regenerate the code in protos/ from the .proto files'

venv: $(STAMP)

# The first Python of 3.11 or newer, whatever it is called; or make PYTHON=/path/to/python.
$(STAMP): pyproject.toml constraints.txt $(NATIVE)
	@set -e; \
	for python in $(or $(PYTHON),python3 python3.14 python3.13 python3.12 python3.11 python); do \
	    if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	        found=$$python; break; \
	    fi; \
	done; \
	if [ -z "$$found" ]; then echo 'error: Python 3.11 or newer is needed; none was found' >&2; exit 1; fi; \
	if ! $(PY) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    $$found -m venv --clear $(VENV) || { echo "error: $$found cannot make a virtual environment; \
	install its venv package (on Debian and Ubuntu: python3-venv)" >&2; exit 1; }; \
	fi
	@echo "installing into $(VENV) (minutes the first time) ..."
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[$(EXTRAS)]'
	@touch $@

model: $(STAMP)
	@$(PY) -m client.public_models smollm2

protos: $(STAMP)
	$(PY) -m grpc_tools.protoc -I. --python_out=. --pyi_out=. --grpc_python_out=. protos/*.proto
	rm -f protos/model_pb2_grpc.py

# The tests that need the model are skipped where it cannot be fetched.
test: $(STAMP)
	@$(PY) -m client.public_models smollm2 >/dev/null || echo 'the tests of the real model will be skipped' >&2
	@$(PY) -m pytest -n 2 --dist loadfile

check: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(VENV)/bin/lint-imports

# Compiling alone: a quarter of an hour on two cores. `make test` compiles a part of them.
kernels: $(STAMP)
	PIPELLM_ALL_KERNELS=1 $(PY) -m pytest tests/stage/backends/cuda/test_compile.py

# The kernel tests of the CPU backend under the address and undefined-behaviour sanitizers (x86, gcc).
sanitize: $(STAMP)
	PIPELLM_SANITIZE=1 $(PY) setup.py -q build_ext --build-lib build/sanitize --build-temp build/sanitize-temp
	PIPELLM_CPU_LIBRARY=build/sanitize/stage/backends/cpu/_native.so ASAN_OPTIONS=detect_leaks=0 \
	LD_PRELOAD="$$(gcc -print-file-name=libasan.so) $$(gcc -print-file-name=libubsan.so)" \
	    $(PY) -m pytest tests/stage/backends/cpu -k "not thousand and not idle and not arm"

demo: $(STAMP)
	@$(PY) -m client.demo
