#!/usr/bin/env bash
# Style, then types as each supported Python version sees them. Expects an environment made by bootstrap.sh.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

.venv/bin/ruff check .
.venv/bin/ruff format --check .
for version in 3.10 3.11 3.12; do
  .venv/bin/mypy --python-version "$version"
done
