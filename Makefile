# make demo ARGS="--headless --seconds 90 --json out.json"      make test ARGS="tests/core -x"
PYTHON ?= python3
ARGS ?=

.PHONY: demo test bench chaos compile lint clean

demo test bench chaos compile lint:
	@$(PYTHON) bootstrap.py run $@ -- $(ARGS)

clean:
	@$(PYTHON) bootstrap.py clean
