# Everything happens in .venv, which `make setup` fills. `make` alone lists the targets.

PYTHON ?= python3
# Pinned, because a bare `torch` pulls gigabytes of CUDA. Another build: make setup TORCH="torch==2.13.0 --index-url URL"
TORCH ?= torch==2.13.0

PY := .venv/bin/python
READY := .venv/.ready

NATIVE := build/native/.built

.PHONY: help setup native sanitize demo quick test test-all test-cold check golden counts bench clean
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 20

setup: $(READY) $(NATIVE) ## fill .venv and build the core; again only after pyproject.toml or csrc/ changed

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(v < (3, 11) and f"Echelon needs Python 3.11 or newer, and $(PYTHON) is {v[0]}.{v[1]}: make setup PYTHON=python3.11")'
	$(PYTHON) -m venv .venv
	$(PY) -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(PY) -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@# a plain path instead of the build backend's import hook: that serves rebuilding on import, and costs every process milliseconds
	@for hook in .venv/lib/python*/site-packages/_editable_skbc_echelon_train.pth; do echo "$(CURDIR)" > "$$hook"; done
	@touch $@

native: $(NATIVE) ## build the compiled core into echelon/native

$(NATIVE): $(READY) $(wildcard csrc/*)
	@mkdir -p build
	@PATH="$(CURDIR)/.venv/bin:$$PATH" cmake -S csrc -B build/native -G Ninja -DPython_EXECUTABLE="$(CURDIR)/$(PY)" > build/native.log 2>&1 \
	  && PATH="$(CURDIR)/.venv/bin:$$PATH" cmake --build build/native >> build/native.log 2>&1 \
	  || { tail -n 40 build/native.log; echo "the compiled core did not build (needs a C++20 compiler); without it: ECHELON_NATIVE=0"; exit 1; }
	@rm -f echelon/native/_core*.so && cp build/native/_core*.so echelon/native/
	@touch $@

sanitize: setup ## the core's stress program under ASan, UBSan and TSan
	@PATH="$(CURDIR)/.venv/bin:$$PATH" sh csrc/sanitize.sh

demo: setup ## one script by every form on 1, 2 and 4 workers, and the same result
	@$(PY) examples/demo.py

QUICK := tests/unit tests/contract tests/equality/test_forms.py --ignore tests/contract/test_among_hosts.py --ignore tests/contract/test_games.py

quick: setup ## unit tests, contracts, one cell a form: a minute and a half, for every save
	@$(PY) -m pytest -m "not slow and not processes" -n 3 $(QUICK)

test: setup ## what every change must pass: under 10 minutes on 2 cores
	@$(PY) -m pytest -m "not slow" -n 4 --second-try --durations 15

test-all: setup ## every test, the slow ones too; PART=2/8 runs an eighth of them, and the parts add up
	@$(PY) -m pytest -n 4 --second-try $(if $(PART),--part $(PART))

COLD := $(addprefix tests/flows/test_,again.py apart.py backup.py copies.py first_error.py gan.py hosts.py keeping.py nothing_left.py servers.py)

test-cold: setup ## kills, stops, joins and resumes once more, each process started for itself
	@$(PY) -m pytest -m "not slow" -n 4 --second-try --start cold $(COLD)

check: setup ## format, lint, strict types, layers
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy
	$(PY) -m pytest tests/unit/test_layers.py

golden: setup ## hashes of what 38 trainings end with, compared with those in the file; ARGS=--write writes them anew
	@$(PY) -m tests.exact.golden $(ARGS)

counts: setup ## calls, messages and bytes of a step, instructions of the core's loops, compared; ARGS=--write writes them anew
	@$(PY) -m tests.exact.counts $(ARGS); calls=$$?; $(PY) -m tests.exact.instructions $(ARGS) && exit $$calls

bench: setup ## step times against torch's own; writes benchmarks/results (others: benchmarks/README.md)
	@$(PY) benchmarks/run.py $(ARGS)

clean: ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv echelon/native/_core*.so .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
