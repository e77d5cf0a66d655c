#!/usr/bin/env bash
# The whole check, as continuous integration runs it: environment, style, unit tests and their coverage, types, the real
# engine with both model runners. One line says how long each job took, and after the first that fails no further begins.
#
# A job keeps one core busy; two run at a time.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

reports=build/test
python=.venv/bin/python
# The packages whose rules decide what is a finding are held to this coverage, in per cent.
required_coverage=90
judging=(facts state checks boundary)

# `job NAME COMMAND ARGUMENT...`: what it prints is shown when it is through, so that the lines of two do not mix.
job() {
  local name=$1 report=$reports/$1.txt from=$SECONDS code=0
  shift
  echo "-- $name" >"$report"
  "$@" >>"$report" 2>&1 || code=$?
  echo "== $name: $([ "$code" -eq 0 ] || echo "FAILED after ")$((SECONDS - from)) s" >>"$report"
  cat "$report"
  return "$code"
}

end() {
  echo "== total: $SECONDS s"
  exit "$1"
}

# `two_at_a_time "NAME COMMAND ARGUMENT..." ...`: two jobs at any moment, in this order.
two_at_a_time() {
  local status=0 running=0 next
  for next in "$@"; do
    if [ "$running" -eq 2 ]; then
      wait -n || status=1
      running=1
    fi
    if [ "$status" -ne 0 ]; then break; fi
    # Jobs are split at spaces; no argument has one inside.
    # shellcheck disable=SC2086
    job $next &
    running=$((running + 1))
  done
  while [ "$running" -gt 0 ]; do
    wait -n || status=1
    running=$((running - 1))
  done
  [ "$status" -eq 0 ] || end 1
}

coverage_report() {
  "$python" -m coverage combine -q
  "$python" -m coverage report --include="$(printf 'src/kvscope/%s/*,' "${judging[@]}")" --fail-under="$required_coverage"
}

scripts/bootstrap.sh
echo "== bootstrap: $SECONDS s"
rm -rf "$reports" && mkdir -p "$reports"
export COVERAGE_FILE=$reports/.coverage
job style scripts/lint.sh style || end 1

tests="-m pytest -q -p no:cacheprovider"
unit=tests/unit
faults=tests/engine/test_faults.py
# Coverage is taken of the unit tests of what judges, without those that make up their cases: that is enough, and tests
# take twice as long under it.
properties="$unit/checks/test_agreement.py $unit/checks/test_plans.py $unit/checks/test_guarded_plans.py"
covered="$python -m coverage run $tests"
judging_tests="$covered $unit/checks $unit/state $unit/facts"
for file in $properties; do judging_tests+=" --ignore=$file"; done
rest="$python $tests $unit"
for folder in checks state facts boundary runtime; do rest+=" --ignore=$unit/$folder"; done

# Unit tests before engines, and the longest first. A process cannot change its runner.
two_at_a_time \
  "unit-rest $rest" \
  "unit-judging $judging_tests" \
  "unit-boundary $covered $unit/boundary $unit/runtime" \
  "unit-properties $python $tests $properties" \
  "types-3.10 scripts/lint.sh types 3.10" \
  "types-3.11 scripts/lint.sh types 3.11" \
  "types-3.12 scripts/lint.sh types 3.12" \
  "engine-v1 $python $tests tests/engine --runner=v1 --ignore=$faults" \
  "engine-v2 $python $tests tests/engine --runner=v2 --ignore=$faults" \
  "engine-v1-faults $python $tests $faults --runner=v1" \
  "engine-v2-faults $python $tests $faults --runner=v2"
job coverage coverage_report || end 1
end 0
