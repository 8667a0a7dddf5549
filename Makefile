# Two commands for a new machine: `make demo` and `make test`. Everything goes into .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# On Linux, PyPI's build is for CUDA: 5 GB with its libraries. The CPU build is enough for the demo and the suite:
# TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu". Where torch is installed already: TORCH=.
TORCH ?= torch==2.13.0
# SageMaker's own SDK does not fit beside what we need: it has a venv of its own.
SAGEMAKER := .venv-sagemaker
SAGEMAKER_CORE := sagemaker-core==2.27.0
# A script may write checkpoints to S3 with s3fs, whose botocore is older than boto3's. Tests give the folder to scripts.
S3FS := .s3fs
S3FS_LIBRARY := s3fs==2026.9.0
# torchx holds urllib3 below 2: it must not do that to what our tests run with. They run its command from a folder.
TORCHX_CLI := .torchx
TORCHX_PACKAGE := torchx==0.7.0
# Huawei's own clients, which judge our signatures, requests and stores; without the packages that we have already.
HUAWEI := .huawei
HUAWEI_SDK := huaweicloudsdkmodelarts==3.1.219 huaweicloudsdkcore==3.1.219 esdk-obs-python==3.26.6 pymongo==4.18.2 \
    simplejson==4.3.0 requests-toolbelt==1.0.0 pyasn1==0.6.3 crcmod==1.7 six==1.17.0 defusedxml==0.7.1 pycryptodome==4.4.0
# The engine that mounts a job's outputs on Azure ML, for make test-azureml-mount alone.
RSLEX := .venv-rslex
RSLEX_ENGINE := azureml-dataprep-rslex==2.26.0
# What looks at our dependencies is none of them.
AUDIT := .venv-audit
AUDITORS := pip-audit==2.10.1 zizmor==1.32.0
# The site needs MkDocs, and cloudtrain does not; the notebook needs a kernel only when its outputs are made anew.
DOCS := .venv-docs
DOCS_TOOLS := mkdocs==1.6.1 mkdocs-material==9.8.1
NOTEBOOK_TOOLS := nbclient==0.11.0 ipykernel==7.4.0
# It runs our tests, so it sees what .venv has, and brings itself alone.
MUTANTS := .venv-mutants
MUTMUT := mutmut==3.8.1
DEMO_STORE := .cloudtrain
# By a path, which costs nothing. setuptools' other way runs code at each start of a Python: half of its time.
EDITABLE := --config-settings editable_mode=compat --editable
# A variable that some images set would have each worker rewrite every test's asserts, and each node compile the package.
PYTEST := env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
ELSEWHERE := not worlds and not proof and not sagemaker_local_mode and not azureml_mount and not azureml_recordings

FOLDERS := HUAWEI_FOLDER=$(CURDIR)/$(HUAWEI) TORCHX_FOLDER=$(CURDIR)/$(TORCHX_CLI) S3FS_FOLDER=$(CURDIR)/$(S3FS)

# The demo takes a fifth of the time that the suite takes to set up. Where that is installed, it does.
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

# What setuptools has to say of an editable installation is nobody's concern here.
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

# Each worker would rewrite the asserts of every module in a new clone. One does it for all of them.
$(VENV)/.collected: $(VENV)/.installed
	$(PYTEST) --collect-only -qq -m '$(ELSEWHERE)' >/dev/null && touch $@ || true

# Four workers on two cores, as whole runs mostly wait. They come first, as they are collected: sorted by their number,
# the few long ones would be left to the end. tests/conftest.py says which tests one worker runs together.
test: install $(VENV)/.collected $(S3FS)/.installed $(TORCHX_CLI)/.installed $(HUAWEI)/.installed
	$(FOLDERS) $(PYTEST) -n 4 --dist loadgroup --no-loadscope-reorder -m '$(ELSEWHERE)' $(TEST_FLAGS)

# What a change must pass before it is merged.
check: lint test

# Property-based tests get a few examples each.
test-fast: install $(VENV)/.collected
	CLOUDTRAIN_TEST_PROFILE=fast $(PYTEST) -n 2 --dist loadgroup -m 'not slow and not remote and not docker and $(ELSEWHERE)' $(TEST_FLAGS)

# The clouds that the suite fakes, themselves; after a change below tests/worlds.
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

# The images of SageMaker's own table, and its local mode, which runs our request; needs docker-compose.
test-sagemaker: install $(SAGEMAKER)/.installed
	SAGEMAKER_PYTHON=$(CURDIR)/$(SAGEMAKER)/bin/python $(PYTEST) -m sagemaker_local_mode tests/providers/test_sagemaker_sdk.py

$(RSLEX)/.installed: Makefile
	$(PYTHON) -m venv $(RSLEX)
	$(RSLEX)/bin/python -m pip install --quiet --no-deps $(RSLEX_ENGINE)
	touch $@

# What a node writes through Azure ML's real mount engine, into Azurite; needs FUSE, and no account.
test-azureml-mount: install $(RSLEX)/.installed
	RSLEX_PYTHON=$(CURDIR)/$(RSLEX)/bin/python $(PYTEST) -m azureml_mount tests/providers/test_azureml_mount.py

# Real answers of Azure ML: RECORDINGS is a folder of recordings in a checkout of Azure/azure-sdk-for-python.
test-azureml-recordings: install
	AZURE_SDK_RECORDINGS=$(abspath $(RECORDINGS)) $(PYTEST) -m azureml_recordings tests/providers/test_azureml_recordings.py

$(AUDIT)/.installed: Makefile
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install --quiet $(AUDITORS)
	touch $@

# Fails, too, where the database of advisories cannot be reached: no answer is no pass.
audit: install $(AUDIT)/.installed
	$(BIN)/python tools/audit.py $(AUDIT)/bin

$(DOCS)/.installed: Makefile
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/python -m pip install --quiet $(DOCS_TOOLS)
	touch $@

# The pages in docs/ as a site in build/site. A page that is in no menu, a link or an anchor that leads nowhere: it fails.
docs: $(DOCS)/.installed
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/python -m mkdocs build --strict

# The notebook's outputs, anew, from a real kernel; the suite only compares them.
notebook: install $(DOCS)/.installed
	$(DOCS)/bin/python -m pip install --quiet $(NOTEBOOK_TOOLS)
	$(DOCS)/bin/python tools/notebook.py $(BIN)/python

$(MUTANTS)/.installed: Makefile | install
	$(PYTHON) -m venv $(MUTANTS)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" \
	    > "$$($(MUTANTS)/bin/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")/project.pth"
	$(MUTANTS)/bin/python -m pip install --quiet $(MUTMUT)
	touch $@

# Fails, too, where a mutant survives that tools/survivors.toml does not explain.
mutants: install $(MUTANTS)/.installed
	$(MUTANTS)/bin/python tools/mutants.py $(MUTANTS_FLAGS)

proof: install $(S3FS)/.installed $(TORCHX_CLI)/.installed $(HUAWEI)/.installed
	$(FOLDERS) $(BIN)/python proof/proof.py $(PROOF)

clean:
	rm -rf $(VENV) $(S3FS) $(TORCHX_CLI) $(HUAWEI) $(SAGEMAKER) $(RSLEX) $(AUDIT) $(DOCS) $(MUTANTS) mutants out build .pytest_cache .mypy_cache .ruff_cache .hypothesis
