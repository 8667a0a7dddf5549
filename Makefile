# Start on a new machine with `make demo` or `make test`. Both install everything into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On Linux, PyPI's build is for CUDA: 5 GB with its libraries. The CPU build is enough for the demo and the suite:
# TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu". If torch is installed already, set TORCH=.
TORCH ?= torch==2.13.0
# SageMaker's SDK needs other versions than our dependencies. It has its own venv.
SAGEMAKER := .venv-sagemaker
SAGEMAKER_CORE := sagemaker-core==2.27.0
# A script may write checkpoints to S3 with s3fs. It needs an older botocore than boto3. Tests give scripts this folder.
S3FS := .s3fs
S3FS_LIBRARY := s3fs==2026.9.0
# torchx needs urllib3 below 2, and our tests use a newer one. The tests run torchx's command from this folder.
TORCHX_CLI := .torchx
TORCHX_PACKAGE := torchx==0.7.0
# Huawei's own clients check our signatures, requests and stores. Packages that .venv already has are left out.
HUAWEI := .huawei
HUAWEI_SDK := huaweicloudsdkmodelarts==3.1.219 huaweicloudsdkcore==3.1.219 esdk-obs-python==3.26.6 pymongo==4.18.2 \
    simplejson==4.3.0 requests-toolbelt==1.0.0 pyasn1==0.6.3 crcmod==1.7 six==1.17.0 defusedxml==0.7.1 pycryptodome==4.4.0
# Azure ML mounts a job's outputs with this engine. Only make test-azureml-mount needs it.
RSLEX := .venv-rslex
RSLEX_ENGINE := azureml-dataprep-rslex==2.26.0
# These tools check our dependencies. They have their own venv, so that they do not check themselves.
AUDIT := .venv-audit
AUDITORS := pip-audit==2.10.1 zizmor==1.32.0
# The site needs MkDocs. The notebook needs a kernel only for `make notebook`.
DOCS := .venv-docs
DOCS_TOOLS := mkdocs==1.6.1 mkdocs-material==9.8.1
NOTEBOOK_TOOLS := nbclient==0.11.0 ipykernel==7.4.0
# mutmut runs our tests, so its venv uses the packages of .venv. Only mutmut is installed in addition.
MUTANTS := .venv-mutants
MUTMUT := mutmut==3.8.1
DEMO_STORE := .cloudtrain
# This mode only adds a path. The default mode of setuptools runs code at each start of Python and doubles its time.
EDITABLE := --config-settings editable_mode=compat --editable
# Some images set this variable. With it, each worker rewrites every test's asserts, and each node compiles the package.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
ELSEWHERE := not worlds and not proof and not sagemaker_local_mode and not azureml_mount and not azureml_recordings

FOLDERS := HUAWEI_FOLDER=$(CURDIR)/$(HUAWEI) TORCHX_FOLDER=$(CURDIR)/$(TORCHX_CLI) S3FS_FOLDER=$(CURDIR)/$(S3FS)

# Setting up the demo takes a fifth of the suite's time. If the suite is installed, the demo uses it.
READY = $(if $(wildcard $(VENV)/.installed),$(VENV)/.installed,$(VENV)/.demo)

.PHONY: demo test test-fast test-worlds check test-sagemaker test-azureml-mount test-azureml-recordings proof mutants lint audit docs \
    notebook install clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH))
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet $(EDITABLE) '.[dev]'
	$(BIN)/python -m compileall -q cloudtrain
	touch $@

# PYTHONWARNINGS hides setuptools' warning about editable installations.
$(VENV)/.demo: pyproject.toml
	@echo "Setting up $(VENV) with torch and cloudtrain: some minutes, 1 GB of disk (5 GB with torch for CUDA)."
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip
	@$(if $(TORCH),$(BIN)/python -m pip install --quiet $(TORCH))
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install --quiet $(EDITABLE) '.[local]'
	@touch $@

demo: $(READY)
	@echo "Training a small CNN on 1,797 handwritten digits: 2 nodes of 2 processes each, all on this machine."
	$(BIN)/cloudtrain submit entrypoints/ddp.py --provider local --nodes 2 --nproc-per-node 2 \
	    --input train=examples/data/digits.csv.gz --store $(DEMO_STORE) --max-runtime 10m --pull out/demo
	@echo; echo "In out/demo are now:"; cd out/demo; for each in artifacts checkpoints; do echo "  $$each/" $$(ls $$each); done; \
	    echo "  logs/" *.json*
	@echo; echo "To continue with README.md: . $(BIN)/activate"

lint: install
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && \
	    $(BIN)/vermin --quiet --target=3.10- --no-tips --violations cloudtrain entrypoints examples

# In a new clone, each worker would rewrite the asserts of every module. This run does it once for all workers.
$(VENV)/.collected: $(VENV)/.installed
	$(PYTEST) --collect-only -qq -m '$(ELSEWHERE)' >/dev/null && touch $@ || true

# Six workers share two cores, because whole runs mostly wait: 10 min 32 s, and 14 min 46 s with four. The order of
# collection stays: it puts whole runs first.
# Sorted by number, the few long groups would run last. tests/conftest.py lists the tests that one worker runs together.
test: install $(VENV)/.collected $(S3FS)/.installed $(TORCHX_CLI)/.installed $(HUAWEI)/.installed
	$(FOLDERS) $(PYTEST) -n 6 --dist loadgroup --no-loadscope-reorder -m '$(ELSEWHERE)' $(TEST_FLAGS)

# Run this before you merge a change.
check: lint test

# Each property-based test runs a few examples. On two cores, four workers were faster than three or five.
test-fast: install $(VENV)/.collected
	CLOUDTRAIN_TEST_PROFILE=fast $(PYTEST) -n 4 --dist loadgroup -m 'not slow and not costly and not remote and not docker and $(ELSEWHERE)' $(TEST_FLAGS)

# Test the fake clouds of the suite. Run this after a change below tests/worlds.
test-worlds: install $(HUAWEI)/.installed
	HUAWEI_FOLDER=$(CURDIR)/$(HUAWEI) $(PYTEST) -n 3 --dist loadgroup -m 'worlds and not proof' $(TEST_FLAGS)

$(S3FS)/.installed: Makefile | install
	$(BIN)/python -m pip install --quiet --upgrade --target $(S3FS) $(S3FS_LIBRARY)
	touch $@

$(TORCHX_CLI)/.installed: Makefile | install
	$(BIN)/python -m pip install --quiet --upgrade --target $(TORCHX_CLI) $(TORCHX_PACKAGE)
	touch $@

$(HUAWEI)/.installed: Makefile | install
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target $(HUAWEI) $(HUAWEI_SDK)
	touch $@

$(SAGEMAKER)/.installed:
	$(PYTHON) -m venv $(SAGEMAKER)
	$(SAGEMAKER)/bin/python -m pip install --quiet $(SAGEMAKER_CORE)
	touch $@

# Check the images in SageMaker's own table, and run our request in its local mode. Needs docker-compose.
test-sagemaker: install $(SAGEMAKER)/.installed
	SAGEMAKER_PYTHON=$(CURDIR)/$(SAGEMAKER)/bin/python $(PYTEST) -m sagemaker_local_mode tests/providers/test_sagemaker_sdk.py

$(RSLEX)/.installed: Makefile
	$(PYTHON) -m venv $(RSLEX)
	$(RSLEX)/bin/python -m pip install --quiet --no-deps $(RSLEX_ENGINE)
	touch $@

# A node writes through Azure ML's real mount engine into Azurite. Needs FUSE, but no account.
test-azureml-mount: install $(RSLEX)/.installed
	RSLEX_PYTHON=$(CURDIR)/$(RSLEX)/bin/python $(PYTEST) -m azureml_mount tests/providers/test_azureml_mount.py

# Test with real answers of Azure ML. RECORDINGS is a folder of recordings in a checkout of Azure/azure-sdk-for-python.
test-azureml-recordings: install
	AZURE_SDK_RECORDINGS=$(abspath $(RECORDINGS)) $(PYTEST) -m azureml_recordings tests/providers/test_azureml_recordings.py

$(AUDIT)/.installed: Makefile
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet $(AUDITORS)
	touch $@

# This also fails if the database of advisories does not answer.
audit: install $(AUDIT)/.installed
	$(BIN)/python tools/audit.py $(AUDIT)/bin

$(DOCS)/.installed: Makefile
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet $(DOCS_TOOLS)
	touch $@

# Build docs/ as a site in build/site. This fails for a page that is in no menu, and for a broken link or anchor.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

# Run the notebook in a real kernel and save its outputs. The suite only compares them.
notebook: install $(DOCS)/.installed
	$(DOCS)/bin/python -m pip install --quiet $(NOTEBOOK_TOOLS)
	$(DOCS)/bin/python tools/notebook.py $(BIN)/python

$(MUTANTS)/.installed: Makefile | install
	$(PYTHON) -m venv $(MUTANTS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > "$$($(MUTANTS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth"
	$(MUTANTS)/bin/python -m pip install --quiet $(MUTMUT)
	touch $@

# This also fails if a mutant survives that tools/survivors.toml does not explain.
mutants: install $(MUTANTS)/.installed
	$(MUTANTS)/bin/python tools/mutants.py $(MUTANTS_FLAGS)

proof: install $(S3FS)/.installed $(TORCHX_CLI)/.installed $(HUAWEI)/.installed
	$(FOLDERS) $(BIN)/python proof/proof.py $(PROOF)

clean:
	rm -rf $(VENV) $(S3FS) $(TORCHX_CLI) $(HUAWEI) $(SAGEMAKER) $(RSLEX) $(AUDIT) $(DOCS) $(MUTANTS) mutants out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
