# Two commands for a new machine: `make demo` and `make test`. Everything goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# The CPU build is enough for the demo and the suite; a GPU machine that has torch already may set TORCH=.
TORCH ?= torch==2.13.0
# SageMaker's own SDK does not fit beside what we need: it has a venv of its own.
SAGEMAKER := .venv-sagemaker
SAGEMAKER_CORE := sagemaker-core==2.27.0
DEMO_STORE := .cloudtrain
PYTEST := $(BIN)/python -m pytest

.PHONY: demo test test-fast test-sagemaker proof lint install clean

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
	    $(BIN)/vermin --quiet --target=3.10- --no-tips --violations cloudtrain entrypoints examples

# Three workers on two cores, as whole runs mostly wait. They come first, as they are collected: sorted by their number,
# the few long ones would be left to the end.
test: demo lint
	$(PYTEST) -n 3 --dist loadscope --no-loadscope-reorder -m 'not proof and not sagemaker_local_mode'

test-fast: install
	$(PYTEST) -n 2 -m 'not slow and not remote and not docker and not proof and not sagemaker_local_mode'

$(SAGEMAKER)/.installed:
	$(PYTHON) -m venv $(SAGEMAKER)
	$(SAGEMAKER)/bin/python -m pip install --quiet $(SAGEMAKER_CORE)
	touch $@

# The images of SageMaker's own table, and its local mode, which runs our request; needs docker-compose.
test-sagemaker: install $(SAGEMAKER)/.installed
	SAGEMAKER_PYTHON=$(CURDIR)/$(SAGEMAKER)/bin/python $(PYTEST) -m sagemaker_local_mode tests/providers/test_sagemaker_sdk.py

proof: install
	$(BIN)/python tests/proof.py $(PROOF)

clean:
	rm -rf $(VENV) $(SAGEMAKER) out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
