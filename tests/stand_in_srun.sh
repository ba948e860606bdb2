#!/bin/bash
# Stands in for srun: starts a command --ntasks times on this machine, and passes signals on. For tests.

tasks=1
output=/dev/stdout
while [[ "${1:-}" == --* ]]; do
    case "$1" in
        --ntasks=*) tasks=${1#*=} ;;
        --output=*) output=${1#*=} ;;
    esac
    shift
done

processes=()
trap 'kill -TERM "${processes[@]}" 2>/dev/null' TERM
for ((task = 0; task < tasks; task++)); do
    SLURM_PROCID=$task "$@" >"${output//%t/$task}" 2>&1 &
    processes+=("$!")
done

code=0
for process in "${processes[@]}"; do
    while kill -0 "$process" 2>/dev/null; do
        wait "$process"
        latest=$?
    done
    wait "$process"
    latest=$?
    [ "$latest" -gt "$code" ] && [ "$latest" != 127 ] && code=$latest
done
exit "$code"
