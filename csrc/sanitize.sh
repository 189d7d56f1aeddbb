#!/bin/sh
# The stress program under each sanitizer. Run from the project's root: make sanitize.
set -eu
for kind in address undefined thread; do
    cmake -S csrc -B "build/$kind" -G Ninja -DECHELON_STRESS=ON -DECHELON_SANITIZE="$kind" > "build/$kind.log" 2>&1
    cmake --build "build/$kind" >> "build/$kind.log" 2>&1 || { tail -n 30 "build/$kind.log"; exit 1; }
    echo "== $kind"
    "build/$kind/stress" "${SEED:-$(date +%s)}" "${OPERATIONS:-2000}"
done
