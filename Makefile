# One command each on a fresh machine: `make demo` and `make test` build .venv and install first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.PHONY: install demo serve lint types test test-slow bench bench-tables docs package encoders clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	$(BIN)/python -m compileall -q src  # pip does this for packages that are not editable
	touch $@

# A first comparison in three minutes on two idle cores: sketches that are part of the package, or
# your own photographs: make demo PHOTOS=FOLDER, with one subfolder for each class.
demo: install
ifdef PHOTOS
	$(BIN)/coda bench photos-demo --set source='$(PHOTOS)' --jobs 2 --out 'runs/demo/$(notdir $(abspath $(PHOTOS)))'
else
	$(BIN)/coda bench pocket-demo --jobs 2 --out runs/demo
endif
	@cat docs/start/after-the-demo.txt

serve: install
	$(BIN)/coda serve

lint: install
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: install
	$(BIN)/mypy

# Three workers for two cores: many tests wait for processes they start.
test: lint types
	$(BIN)/python -m pytest -m 'not slow' -n 3 --dist loadfile --no-loadscope-reorder

test-slow: install
	$(BIN)/python -m pytest -m slow

# The site in site/: open site/index.html, no web server is needed.
docs: $(VENV)/.installed-docs
	$(BIN)/mkdocs build --strict
	$(BIN)/python tools/check_site.py site

$(VENV)/.installed-docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[docs]'
	touch $@

# The source archive, and the wheel built from it, in dist/.
package: install
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[release]'
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

# Fails if a training step is slower than the committed baseline; on idle cores, two minutes.
bench: install
	$(BIN)/python benchmarks/regression.py

# The tables of docs/lab/performance.md, on idle cores.
bench-tables: install
	$(BIN)/python benchmarks/speed.py
	$(BIN)/python benchmarks/tasks.py
	$(BIN)/python benchmarks/classifier.py --out benchmarks/classifier.json

# The graphs of pocket and photo-vit in src/coda_prompt/assets, from their weights; a minute.
encoders: install
	$(BIN)/python tools/make_encoders.py

clean:
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
