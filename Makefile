# The commands that people and CI run. Each does its own set-up: a virtual environment, made once.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2
CONFORMANCE := conformance/mtp_zoo_conformance/*.py,conformance/mtp_zoo_conformance/cases/*.py,conformance/mtp_zoo_conformance/reference/*.py,conformance/mtp_zoo_conformance/tiers/*.py
HEART := mtp_zoo/keymap.py,mtp_zoo/loader.py,mtp_zoo/objective.py,mtp_zoo/losses.py,mtp_zoo/logits.py,mtp_zoo/chunked_loss.py,mtp_zoo/stats.py,mtp_zoo/batch*.py,mtp_zoo/loss_plan.py,mtp_zoo/host_copies.py,mtp_zoo/unused_parameters.py,mtp_zoo/arguments.py,mtp_zoo/document*.py,mtp_zoo/rollout.py,mtp_zoo/chain_*.py,mtp_zoo/prefix_attention.py,mtp_zoo/key_store.py,mtp_zoo/attach*.py,mtp_zoo/detacher.py,mtp_zoo/made_class.py,mtp_zoo/ddp_parameters.py,mtp_zoo/trainer_integration.py,mtp_zoo/trained_head.py,mtp_zoo/drafting.py,mtp_zoo/verifier.py,mtp_zoo/speculation.py,mtp_zoo/ragged_cache.py,mtp_zoo/acceptance*.py,mtp_zoo/parallel.py,mtp_zoo/context_*.py,mtp_zoo/checkpoint*.py,mtp_zoo/safetensors_header.py,mtp_zoo/index_file.py,mtp_zoo/storage.py,mtp_zoo/hub_*.py,mtp_zoo/export*.py,mtp_zoo/overlay.py,mtp_zoo/journal.py,mtp_zoo/graft*.py,mtp_zoo/vocabulary.py,mtp_zoo/containment.py,mtp_zoo/json_text.py,mtp_zoo/cache_tree.py,mtp_zoo/head_parts.py,mtp_zoo/diagnosis/*.py,mtp_zoo/verification.py,mtp_zoo/provenance.py,mtp_zoo/card.py,mtp_zoo/publishing.py,mtp_zoo/sharded_*.py,mtp_zoo/site.py,mtp_zoo/copies.py,mtp_zoo/groups.py,mtp_zoo/corrections.py,mtp_zoo/fp8.py,mtp_zoo/scaling.py,mtp_zoo/quant*.py,$(CONFORMANCE)

export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false

.PHONY: demo demo-short test conformance lint types docs benchmarks clean

demo: $(STAMP)
	$(BIN)/mtp-zoo demo

demo-short: $(STAMP)
	$(BIN)/mtp-zoo demo --short --json --out build/demo-short

test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not (module or serve)" -n $(WORKERS) --dist loadfile --cov --cov-report=
	$(BIN)/coverage report
	@echo "Coverage of the heart:"
	$(BIN)/coverage report --include="$(HEART)" --fail-under=95

conformance: $(STAMP)
	$(BIN)/mtp-zoo conform --install vllm --install sglang
	$(BIN)/mtp-zoo conform --report build/conformance

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(STAMP)
	$(BIN)/pip install --quiet --constraint constraints/dev.txt -e ".[docs]"
	$(BIN)/mkdocs build --strict

benchmarks: $(STAMP)
	$(BIN)/python benchmarks/bytes_read.py
	$(BIN)/python benchmarks/load_memory.py
	$(BIN)/python benchmarks/chain_rollout.py
	$(BIN)/python benchmarks/hot_path.py
	$(BIN)/python benchmarks/host_syncs.py
	$(BIN)/python benchmarks/chunked_loss.py
	$(BIN)/python benchmarks/step_growth.py
	$(BIN)/python benchmarks/step_vs_speculators.py --install
	$(BIN)/python benchmarks/step_vs_speculators.py
	$(BIN)/python benchmarks/export.py
	$(BIN)/python benchmarks/dry_run.py
	$(BIN)/python benchmarks/doctor_names.py
	$(BIN)/python benchmarks/fp8_error.py
	$(BIN)/python benchmarks/demo_seeds.py

$(STAMP): pyproject.toml constraints/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --constraint constraints/dev.txt torch
	$(BIN)/pip install --quiet --constraint constraints/dev.txt -e ".[dev]"
	@touch $@

clean:
	rm -rf $(VENV) build site demo-out .pytest_cache .ruff_cache .hypothesis .coverage
