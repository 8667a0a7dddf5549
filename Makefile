# Two commands for a new machine: `make demo` and `make test`. Everything goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build is enough for the demo and the suite; a GPU machine that has torch already may set TORCH=.
TORCH ?= torch==2.13.0
DEMO_STORE := .cloudtrain
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test test-fast proof lint install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH))
	$(BIN)/python -m pip install --quiet --editable '.[dev]'
	$(BIN)/python -m compileall -q cloudtrain
	touch $@

demo: install
	$(BIN)/cloudtrain submit entrypoints/ddp.py --provider local --nodes 2 --nproc-per-node 2 \
	    --input train=examples/data/digits.csv.gz --store $(DEMO_STORE) --max-runtime 10m --pull out/demo
	@echo; echo "pulled to out/demo:"; ls -R out/demo | head -40

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && \
	    $(BIN)/vermin --quiet --target=3.10- --no-tips --violations cloudtrain entrypoints

test: demo lint
	$(PYTEST) -m 'not proof'

test-fast: install
	$(PYTEST) -n 2 -m 'not slow and not remote and not proof'

proof: install
	$(BIN)/python tests/proof.py $(PROOF)

clean:
	rm -rf $(VENV) out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
