# `make demo` and `make test` set up everything they need, given Python >= 3.11 and make.
# When .venv is created, TORCH='torch==2.11.0' (any pip requirement) selects another torch, and TORCH=system uses the
# torch of your Python. To change it later, run `make clean` first.

.PHONY: demo test test-slow fuzz test-lowest lint docs dist test-wheel test-wheel-lowest clean

PYTHON ?= $(shell for python in python3.13 python3.12 python3.11 python3; do \
	$$python -c 'import sys, ensurepip; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 && echo $$python && break; done)

PYTEST = -m pytest -n 2 --dist worksteal --durations=30

demo: .venv/.ready
	@.venv/bin/python -m examples.demo

test: lint
	.venv/bin/python $(PYTEST) -m "not slow and not perf"

test-slow: .venv/.ready
	.venv/bin/python $(PYTEST) -m "slow and not perf"

# Tens of thousands of new random inputs for every border; `make test` has a few thousand, the same each time.
fuzz: .venv/.ready
	FUZZ=8 .venv/bin/python $(PYTEST) tests/fuzz

test-lowest: .venv-lowest/.ready
	.venv-lowest/bin/python $(PYTEST) -m "not perf"

lint: .venv/.ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/mypy

docs: .venv/.ready
	NO_MKDOCS_2_WARNING=1 .venv/bin/mkdocs build --strict

dist: .venv/.ready
	rm -rf dist
	.venv/bin/python -m build -q

# Runs the tests against the wheel in dist/, in a clean environment, without the source of the package.
test-wheel: requirements-dev.txt
test-wheel-lowest: requirements-dev.txt requirements-lowest.txt
test-wheel test-wheel-lowest:
	rm -rf build/$@ && mkdir -p build/$@
	TORCH="$(TORCH)" PROJECT="$$(echo dist/*.whl)" $(PYTHON) scripts/create_venv.py build/$@/venv $^
	cp -r tests benchmarks conformance examples notebooks docs mkdocs.yml scripts pyproject.toml MANIFEST.in .github requirements-*.txt README.md CHANGELOG.md CONTRIBUTING.md build/$@
	cd build/$@ && venv/bin/python $(PYTEST) -m "not perf"

.venv/.ready: requirements-dev.txt
.venv-lowest/.ready: requirements-dev.txt requirements-lowest.txt
.venv/.ready .venv-lowest/.ready: pyproject.toml scripts/create_venv.py
	@test -n "$(PYTHON)" || { echo "No Python >= 3.11 with the venv module found (tried python3.13, python3.12," \
	  "python3.11, python3). Install one, or name it: make PYTHON=/path/to/python" >&2; exit 1; }
	@TORCH="$(TORCH)" $(PYTHON) scripts/create_venv.py $(@D) $(filter %.txt,$^)
	@touch $@

clean:
	rm -rf .venv .venv-lowest build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
