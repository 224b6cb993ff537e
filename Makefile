.PHONY: test test-gpu sweep lint format

test:
	pytest

test-gpu:
	pytest -m gpu

sweep:
	pytest -m sweep --timeout 3600

lint:
	ruff check
	ruff format --check
	codespell

format:
	ruff check --fix
	ruff format
