# `make demo` trains a model twice. `make test` checks the code.
# The first run of each installs the packages that it needs in .venv; later runs start at once.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
OURS := amd-epyc-2-cores
MACHINE ?= $(OURS)
# Several files of tests at a time. A thread that waits must not spin on a core that another file needs.
PYTEST := OMP_WAIT_POLICY=PASSIVE $(RUN) -m pytest --dist loadfile

.PHONY: help demo test test-real test-all test-oldest gpu lint charts site clean
.DEFAULT_GOAL := help

help:  ## list these commands
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' Makefile

demo: $(VENV)/ready  ## train with one process, then with two, and compare: a minute on two cores
	$(RUN) tools/demo.py
	@echo
	@echo "Next: docs/ddp-in-12-lines.md   the shortest script for several GPUs"
	@echo "      docs/01_snsc.md           the first chapter: a larger model, and what each line means"
	@echo "      $(RUN) 01_snsc.py --limit 16000 --epochs 2   one to three minutes on two cores"

test: $(VENV)/ready-dev  ## run the quick tests: about four minutes on two cores
	$(PYTEST) -n 2 -m "not slow"
	@echo "The quick tests have passed. Those on real launchers, clusters and kills too: make test-real"

test-real: test $(VENV)/ready-site  ## run the quick tests, then those on real launchers, clusters and kills: 20 minutes
	$(PYTEST) -n 3 -m "slow and not rare"

test-all: test-real  ## run these, then the benchmarks and second cases of a promise: half an hour
	$(PYTEST) -n 3 -m rare

test-oldest:  ## run the quick tests with torch 2.9, the oldest supported, in .venv-oldest; PYTHON=python3.10 too
	$(MAKE) --no-print-directory VENV=.venv-oldest TORCH="torch==2.9.* torchvision==0.24.*" test

gpu:  ## prove and measure all on NVIDIA GPUs: 14 minutes in parts, installs nothing; PYTHON=... if not in .venv
	$(if $(filter file,$(origin PYTHON)),$(RUN),$(PYTHON)) tools/gpu.py

# A contributor need not write Chinese: a stale passage is a warning here, and an error in .ci/run.
STALE ?= warning

lint: $(VENV)/ready-dev  ## check style and formatting; stale Chinese passages are warnings
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(RUN) tools/book/chinese.py || [ $(STALE) = warning ]

# The notebooks in the repository hold the charts of the docs. Those of other machines are written to .venv/charts/.
EXECUTED := $(if $(FIGURES)$(filter-out $(OURS),$(MACHINE)),$(VENV)/charts,notebooks)

charts: $(VENV)/ready-charts  ## redraw docs/figures/ and notebooks/ from results/; for your machine: MACHINE=name
	@set -e; for notebook in $(filter-out %/kaggle.ipynb,$(wildcard notebooks/*.ipynb)); do name=`basename $$notebook .ipynb`; \
		if [ -e results/$$name/$(MACHINE).jsonl ]; then \
			echo "drawing $$name from results/$$name/$(MACHINE).jsonl"; drawn=1; \
			MACHINE=$(MACHINE) $(RUN) -m nbconvert --log-level=ERROR --to notebook --execute \
				--ExecutePreprocessor.record_timing=False --output-dir $(EXECUTED) $$notebook; \
		else echo "skipping $$name, which is not recorded: see results/README.md"; \
		fi; \
	done; [ "$$drawn" ] || { echo "make: nothing in results/ for MACHINE=$(MACHINE)" >&2; exit 2; }
	$(if $(filter notebooks,$(EXECUTED)),$(RUN) notebooks/charts.py)

SITE := site
SPHINX := $(RUN) -m sphinx -q -W --keep-going -E -c tools/site -d $(VENV)/doctrees

site: $(VENV)/ready-site  ## build the book as a site in site/, in English and Chinese: open site/index.html
	rm -rf $(SITE)
	SITE_LANGUAGE=en $(SPHINX)-en . $(SITE)
	SITE_LANGUAGE=zh $(SPHINX)-zh . $(SITE)/zh
	@echo "The site is in $(SITE)/: open $(SITE)/index.html"

clean:  ## remove .venv, site/ and caches; data/ and results/ stay
	rm -rf $(VENV) .venv-* site .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './data/*' -prune -exec rm -rf {} +

$(VENV)/ready: requirements.txt
	@$(call make_venv)
	$(RUN) -m pip install --quiet --disable-pip-version-check -r requirements.txt $(TORCH)
	@touch $@

$(VENV)/ready-%: requirements-%.txt $(VENV)/ready
	$(RUN) -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

$(VENV)/ready-dev: requirements-charts.txt  # is a part of requirements-dev.txt

VENV_PACKAGE = $(PYTHON) -c 'import sys; print("python3.%d-venv" % sys.version_info[1])'

# Debian and Ubuntu package venv separately from Python. Install the package if we are root, else print the command.
define make_venv
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null || { \
		echo "make: found `$(PYTHON) --version 2>&1`, expected Python 3.10 or newer: make PYTHON=python3.12 ..." >&2; exit 2; }; \
	$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		[ "`id -u`" = 0 ] && echo "installing `$(VENV_PACKAGE)`" && apt-get update -qq && apt-get install -y -qq `$(VENV_PACKAGE)`; } || { \
		echo "make: $(PYTHON) cannot create a virtual environment: run sudo apt-get install `$(VENV_PACKAGE)` and try again" >&2; exit 2; }; \
	echo "setting up $(VENV), once: 3 GB to download, 6 GB on disk; without an NVIDIA GPU see README.md, Start"; \
	$(PYTHON) -m venv $(VENV)
endef
