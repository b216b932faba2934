# make lab        set up once, then open JupyterLab on the course
# make test       set up once, then run every test: unit, doctests, notebooks, browser
# make notebooks  execute the notebooks again and store their outputs
# make pictures   draw the README's picture again
# make screenshot take the README's picture of the sliders again, in a real browser
# make truth      published measurements of real cards beside the virtual card's figures (some minutes)
# make bench      how fast the instrument is, beside PyTorch's own; our step against TRL's trainer
# make card       measure this machine's CUDA card beside its prediction, and keep the result as data
# make clean      remove what the above have made
#
# PYTHON=python3.12 takes another Python; LAB_ARGS are handed to JupyterLab, for instance
#   make lab LAB_ARGS="--no-browser --port 8899 --ServerApp.token=''"

PYTHON    ?= python3
VENV      ?= .venv
LAB_ARGS  ?=
NOTEBOOKS ?= $(wildcard notebooks/*.ipynb)
WORKERS   ?= 2

BIN  := $(VENV)/bin
LAB  := $(VENV)/.lab-is-installed
TEST := $(VENV)/.test-is-installed

NBVAL = --nbval --nbval-current-env --nbval-cell-timeout=600 --nbval-sanitize-with=tests/notebooks/sanitize.cfg
XDIST = -n $(WORKERS) --dist loadfile
# A server refuses to run as root unless told that this is meant, as in a container.
ROOT_ARGS := $(shell [ "$$(id -u)" = 0 ] && echo --allow-root)

.DELETE_ON_ERROR:
.PHONY: lab test test-unit test-notebooks test-browser notebooks pictures truth bench card screenshot clean

lab: $(LAB)
	$(BIN)/jupyter lab $(ROOT_ARGS) --ServerApp.root_dir="$(CURDIR)/notebooks" \
		--LabApp.default_url=/lab/tree/00_start_here.ipynb $(LAB_ARGS)

test: $(TEST)
	$(BIN)/python -m pytest $(XDIST) $(NBVAL)

test-unit: $(TEST)
	$(BIN)/python -m pytest $(XDIST) -m "not browser" tests grpo_lab

test-notebooks: $(TEST)
	$(BIN)/python -m pytest $(XDIST) $(NBVAL) tests/notebooks $(NOTEBOOKS)

test-browser: $(TEST)
	$(BIN)/python -m pytest tests/browser

notebooks: $(TEST)
	$(BIN)/python scripts/run_notebooks.py $(NOTEBOOKS)

truth: $(LAB)
	$(BIN)/python tests/truth/table.py

bench: $(LAB)
	$(BIN)/python scripts/bench.py
	$(BIN)/python scripts/bench_trl.py

card: $(LAB)
	$(BIN)/python scripts/measure_card.py

screenshot: $(TEST)
	SCREENSHOT="$(CURDIR)/docs/explorer.png" $(BIN)/python -m pytest tests/browser/test_sliders.py

pictures: $(LAB)
	$(BIN)/python scripts/make_pictures.py

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "Setting up $(VENV): once, and a few minutes where PyTorch has to be fetched."
	$(PYTHON) -m venv $(VENV)

# An install is repeated when pyproject.toml changes; the package itself is editable.
$(LAB): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e .
	touch $@

$(TEST): pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check -e '.[test]'
	touch $@ $(LAB)

clean:
	rm -rf $(VENV) dist .pytest_cache .hypothesis notebooks/.ipynb_checkpoints
	find grpo_lab tests scripts -name __pycache__ -type d -prune -exec rm -rf {} +
