#!/usr/bin/env bash
# The whole check, as continuous integration runs it: environment, style and types, unit tests, the real engine with
# both model runners, coverage. Stops at the first stage that fails and says how long each took.
#
# The two engine stages run side by side, one process a runner: a process cannot change its runner, and an engine in
# a test keeps one core busy.
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

covered_pytest() { COVERAGE_FILE=build/test/.coverage "$python" -m coverage run -m pytest "$@"; }

# Runs two selections of tests, a core each: `side_by_side NAME "ARGUMENTS" NAME "ARGUMENTS"`. The second one's output is
# shown when the first is through, so that the lines do not mix.
side_by_side() {
  local other status=0
  # Arguments are split at spaces; none of them has one inside.
  # shellcheck disable=SC2086
  covered_pytest $4 -q -p no:cacheprovider >"$reports/beside.txt" 2>&1 &
  other=$!
  echo "-- $1"
  # shellcheck disable=SC2086
  covered_pytest $2 -q -p no:cacheprovider || status=1
  wait "$other" || status=1
  echo "-- $3 (ran beside it)"
  cat "$reports/beside.txt"
  return "$status"
}

unit_tests() {
  local offline="tests/unit/analysis tests/unit/cli tests/unit/events tests/unit/reports tests/unit/sinks" rest=tests/unit
  for folder in $offline; do rest+=" --ignore=$folder"; done
  side_by_side "records, files and commands" "$offline" "rules and wiring" "$rest"
}

engine_tests() {
  side_by_side "runner v1" "tests/engine --runner=v1" "runner v2" "tests/engine --runner=v2"
}

coverage_report() {
  local include="" package
  for package in "${judging[@]}"; do
    if [ -d "src/kvscope/$package" ]; then include+="${include:+,}src/kvscope/$package/*"; fi
  done
  export COVERAGE_FILE=build/test/.coverage
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
stage "engine tests" engine_tests
stage coverage coverage_report
echo "== total: $((SECONDS - began)) s"
