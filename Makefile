# `make pretrain` and `make test` are all a new machine needs: Python >= 3.11, make and a package index.
PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check install --quiet
# A Python that has torch keeps it: the environment sees it. Otherwise torch is installed, from TORCH_INDEX_URL when set.
HAS_TORCH := $(shell $(PYTHON) -c 'import torch' 2>/dev/null && echo yes)

.PHONY: pretrain test test-layouts parity test-slow lint dry-run check-shards megatron-next clean

pretrain: $(VENV)/.runtime
	$(BIN)/python -m msa_pretrain.scripts.prepare_data --corpus builtin --output runs/data/builtin
	$(BIN)/python -m msa_pretrain.scripts.pretrain experiment=cpu_smoke

test: $(VENV)/.dev
	$(BIN)/pytest -n 2 --dist loadfile -m "not slow and not layouts"

# Many jobs of one and two processes: each feature of a layout, restarts, resharding (14 minutes).
test-layouts: $(VENV)/.dev
	$(BIN)/pytest -m "layouts and not parity"

# The same with every pair of features, and four processes (about twenty minutes).
parity: $(VENV)/.dev
	$(BIN)/pytest -m layouts

test-slow: $(VENV)/.dev
	$(BIN)/pytest -m slow

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy kernels model data training
	$(BIN)/lint-imports

dry-run: $(VENV)/.runtime
	for experiment in configs/experiment/*.yaml; do \
		$(BIN)/python -m msa_pretrain.scripts.pretrain experiment=$$(basename $$experiment .yaml) dry_run=true || exit 1; \
	done
	$(BIN)/python -m msa_pretrain.scripts.plan experiment=msa_pt_230b gpus=512 gpu=h200

# The same, and the share of every rank built without memory: do the shares make the model? (about five minutes)
check-shards:
	WORLD_SIZE=smallest $(MAKE) dry-run

$(VENV)/.torch:
	$(PYTHON) -m venv $(if $(HAS_TORCH),--system-site-packages) $(VENV)
	$(if $(HAS_TORCH),,$(PIP) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL)) $(TORCH))
	touch $@

$(VENV)/.runtime: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -c constraints.txt -e .
	touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(VENV)/.torch
	$(PIP) -c constraints.txt -e '.[dev]'
	touch $@ $(VENV)/.runtime

# The newest megatron-core in an environment of its own: a fault that is gone there names a remedy that can go here.
megatron-next:
	$(MAKE) VENV=.venv-next .venv-next/.dev
	.venv-next/bin/pip --disable-pip-version-check install --quiet --upgrade --no-deps megatron-core
	.venv-next/bin/pip list | grep -i megatron-core
	-.venv-next/bin/pytest -m megatron_fault -q

clean:
	rm -rf $(VENV)
