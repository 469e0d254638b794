# `make demo` and `make test` need nothing but Python 3.11 or newer: they make their own virtual environment in .venv.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
JOBS ?= 2
COMMA := ,
# Linux without a GPU needs a backend for MLX; on macOS MLX has Metal. EXTRAS=dev,cuda is for a Linux machine with a GPU.
EXTRAS := $(if $(filter Linux,$(shell uname -s)),dev$(COMMA)cpu,dev)

.PHONY: demo test lint smoke clean

$(BIN)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[$(EXTRAS)]"
	touch $@

demo: $(BIN)/.installed
	$(BIN)/mlxdet train --preset nano --steps 600 --seed 7 --val-every 200 --sample-every 300 --out runs/demo --overwrite
	$(BIN)/mlxdet generate runs/demo --prompt "The " --tokens 300 --temperature 0.7
	@echo
	@echo "The same seed again, in a new process: the two sums must be the same."
	$(BIN)/mlxdet train --preset nano --steps 600 --seed 7 --val-every 0 --log-every 300 --out runs/demo-again --overwrite
	@$(BIN)/python -c "import hashlib,sys; sums=[hashlib.sha256(open(f'runs/{r}/checkpoints/00000600/model.safetensors','rb').read()).hexdigest() for r in ('demo','demo-again')]; print(*sums, sep='\n'); print('identical to the bit' if sums[0]==sums[1] else 'DIFFERENT'); sys.exit(sums[0]!=sums[1])"

test: $(BIN)/.installed
	$(BIN)/python -m pytest -n $(JOBS)

lint: $(BIN)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

smoke: $(BIN)/.installed
	evals/determinism-smoke

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache
