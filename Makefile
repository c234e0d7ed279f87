# make demo     installs what a run needs, then shows on one screen what it does
# make test     the tests; make test-fast is the quick part, make test-long has the long ones besides
# Without make: docs/reference.md#without-make
.PHONY: demo test test-fast test-long lint lock figures mutants fuzz coverage clean

PY := .venv/bin/python
# A worker takes neighbouring tests: they share fixtures. Four workers on two cores: many tests wait.
PYTEST := $(PY) -m pytest --dist worksteal
export PYTHONDONTWRITEBYTECODE := # each worker, and each process of a test, would compile every module anew

# Installs what is missing; instant if nothing changed.
.venv/.installed: requirements-build.lock requirements.lock requirements-cuda.lock pyproject.toml machine-install.sh
	@./machine-install.sh $(INSTALL)
	@touch $@

# The same with what tests and lint need.
.venv/.installed-dev: requirements-dev.lock .venv/.installed
	@./machine-install.sh --dev $(INSTALL)
	@touch $@

demo: .venv/.installed
	@$(PY) bench/demo.py

test: .venv/.installed-dev
	$(PYTEST) -n 4 -m "not long"

# More cases of what `make test` has a few of, and tests of half a minute and more: twenty minutes on two cores.
test-long: .venv/.installed-dev
	$(PYTEST) -n 4 -m long

test-fast: .venv/.installed-dev
	$(PYTEST) -n auto --maxprocesses 4 -m "not slow and not gpu"

lint: .venv/.installed-dev
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy

# The locks anew, in the newest versions that pyproject.toml allows; then run the tests.
lock:
	@./lock.sh

# Plants faults in the sampler and shows which proof catches each.
mutants: .venv/.installed-dev
	$(PY) -m tests.proofs.mutants

# Most figures of README and docs anew (bench/README.md), on a quiet machine; FIGURES="only=fast,demo" for some.
figures: .venv/.installed-dev
	$(PY) bench/all.py $(FIGURES)

# Ten thousand random files of prompts; SEED= for others.
fuzz: .venv/.installed-dev
	FUZZ_FILES=10000 FUZZ_SEED=$(or $(SEED),1) $(PY) -m pytest -q tests/test_fuzz.py

# What the quick tier does not run, by lines and branches; PICK= for all tests (an hour).
PICK ?= -m "not slow and not gpu"
coverage: .venv/.installed-dev
	$(PY) -m coverage erase
	-$(PY) -m coverage run -m pytest -n auto --maxprocesses 4 $(PICK)
	$(PY) -m coverage combine -q
	$(PY) -m coverage report --skip-covered

clean:
	rm -rf .venv outputs .mypy_cache .ruff_cache .pytest_cache
