#!/usr/bin/env bash
# The whole check, as continuous integration runs it: environment, style and types, unit tests and their coverage, the
# real engine with both model runners. Stops at the first stage that fails and says how long each took.
#
# An engine in a test keeps one core busy; two run at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

began=$SECONDS
reports=build/test
python=.venv/bin/python
# The packages whose rules decide what is a finding are held to this coverage, in per cent.
required_coverage=90
judging=(facts state checks boundary)

stage() {
  local name=$1 from=$SECONDS
  shift
  echo "== $name"
  if "$@"; then
    echo "== $name: $((SECONDS - from)) s"
  else
    echo "== $name: FAILED after $((SECONDS - from)) s" >&2
    echo "== total: $((SECONDS - began)) s" >&2
    exit 1
  fi
}

# `two_at_a_time NAME "MODULE ARGUMENTS" ...`: runs selections of tests, each in a process of its own, two at any moment
# since there are two cores. What a selection prints is shown when it is through, so that the lines do not mix.
two_at_a_time() {
  local status=0 running=0
  while [ $# -gt 0 ]; do
    if [ "$running" -eq 2 ]; then
      wait -n || status=1
      running=1
    fi
    # Arguments are split at spaces; none of them has one inside.
    # shellcheck disable=SC2086
    ("$python" -m $2 -q -p no:cacheprovider >"$reports/$1.txt" 2>&1; code=$?; echo "-- $1"; cat "$reports/$1.txt"; exit "$code") &
    running=$((running + 1))
    shift 2
  done
  while [ "$running" -gt 0 ]; do
    wait -n || status=1
    running=$((running - 1))
  done
  return "$status"
}

# Of unit tests alone the coverage is taken: they reach more than enough, and engines would take half as long again.
unit_tests() {
  local run="coverage run -m pytest" rest="tests/unit" folder
  for folder in checks state boundary runtime; do rest+=" --ignore=tests/unit/$folder"; done
  export COVERAGE_FILE=build/test/.coverage
  two_at_a_time checks "$run tests/unit/checks" rest "$run $rest" \
    state "$run tests/unit/state" boundary "$run tests/unit/boundary tests/unit/runtime"
}

# The longest first. A process cannot change its runner.
engine_tests() {
  local faults=tests/engine/test_faults.py
  two_at_a_time \
    v1 "pytest tests/engine --runner=v1 --ignore=$faults" v2 "pytest tests/engine --runner=v2 --ignore=$faults" \
    v2-faults "pytest $faults --runner=v2" v1-faults "pytest $faults --runner=v1"
}

coverage_report() {
  local include="" package
  for package in "${judging[@]}"; do
    if [ -d "src/kvscope/$package" ]; then include+="${include:+,}src/kvscope/$package/*"; fi
  done
  "$python" -m coverage combine -q
  "$python" -m coverage report --format=total | sed 's/$/ % of kvscope is covered/'
  if [ -z "$include" ]; then
    echo "not run: coverage threshold: none of ${judging[*]} exists"
    return
  fi
  "$python" -m coverage report --include="$include" --fail-under="$required_coverage"
}

stage bootstrap scripts/bootstrap.sh
rm -rf "$reports" && mkdir -p "$reports"
stage "style and types" scripts/lint.sh
stage "unit tests" unit_tests
stage coverage coverage_report
stage "engine tests" engine_tests
echo "== total: $((SECONDS - began)) s"
