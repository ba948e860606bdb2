# The batch step, on the first node of the job, runs the coordinator. srun starts one agent on each node, and each
# agent connects to the coordinator: the names of the nodes need not be known. The exit code is that of the coordinator.
# If an earlier job was ended before its run, and the run has a checkpoint, this job resumes the run.
#
# SHOAL_HOST    the name or address of the first node on the network to use (default: its host name)
# SHOAL_PORT    the port of the coordinator (default: derived from the job id, so that jobs can share a host)

set -u

fail() {
    printf 'error: %s\n' "$1" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is a script for SLURM: submit it with sbatch"
cd "${SLURM_SUBMIT_DIR:-.}" || fail "cannot enter the folder $SLURM_SUBMIT_DIR"
[ -f "$experiment" ] || fail "there is no $experiment in $PWD: submit the job from its own folder"
command -v shoal >/dev/null || fail "there is no command shoal: add the commands that make it available above"

host=${SHOAL_HOST:-$(hostname)}
port=${SHOAL_PORT:-$((10000 + SLURM_JOB_ID % 20000))}
made_keys=
coordinator=
step=
interrupted=

is_running() {
    [ -n "$1" ] && kill -0 "$1" 2>/dev/null
}

# A trap can interrupt this pause.
pause() {
    sleep 1 &
    wait "$!"
}

# Wait for a process to end, in spite of signals, and return its exit code.
exit_code_of() {
    local code=0 latest
    while :; do
        interrupted=
        wait "$1"
        latest=$?
        [ "$latest" = 127 ] || code=$latest
        [ -n "$interrupted" ] || return "$code"
    done
}

# Give process $1 $2 seconds to end, then send SIGTERM, and SIGKILL after 30 more seconds.
end_after() {
    local seconds=0
    while is_running "$1" && [ "$seconds" -lt $(($2 + 30)) ]; do
        [ "$seconds" = "$2" ] && kill -TERM "$1" 2>/dev/null
        seconds=$((seconds + 1))
        pause
    done
    is_running "$1" && kill -KILL "$1" 2>/dev/null
}

# SIGTERM arrives before a time limit and on pre-emption. The coordinator ends its agents and writes what it has.
# shellcheck disable=SC2329  # called by a trap
stop() {
    interrupted=yes
    is_running "$coordinator" || exit "${code:-143}"
    kill -TERM "$coordinator" 2>/dev/null
}

# shellcheck disable=SC2329  # called by a trap
clean_up() {
    trap '' TERM INT HUP
    is_running "$coordinator" && end_after "$coordinator" 0
    is_running "$step" && end_after "$step" 0
    [ -z "$made_keys" ] || rm -rf "$made_keys"
}

trap clean_up EXIT
trap stop TERM INT HUP

if [ -z "$keys" ]; then
    keys=$PWD/keys-$SLURM_JOB_ID
    made_keys=$keys
    (umask 077 && shoal keys make "$keys" --name coordinator --name agent) || fail "cannot make keys in $keys"
fi
mkdir -p logs || fail "cannot make the folder $PWD/logs"

shoal run "$experiment" --resume --listen "0.0.0.0:$port" --expect "$agents" \
    --key "$keys/coordinator.key_secret" --trust "$keys/agent.key" &
coordinator=$!

# Other agents continue if one fails: the coordinator decides whether the run does.
# shellcheck disable=SC2016
srun --nodes="$agents" --ntasks="$agents" --ntasks-per-node=1 --cpus-per-task="$cpus" \
    --kill-on-bad-exit=0 --wait=0 --output="logs/$SLURM_JOB_ID-agent-%t.log" \
    bash -c 'exec shoal agent --name "agent-$SLURM_PROCID" "$@"' agent \
    --join "$host:$port" --cores "$cpus" --key "$keys/agent.key_secret" --trust "$keys/coordinator.key" \
    "${agent_options[@]}" &
step=$!

while is_running "$coordinator" && is_running "$step"; do
    pause
done
if is_running "$coordinator"; then
    exit_code_of "$step"
    ended=$?
    if [ "$ended" -gt 128 ]; then
        printf 'all agents were ended by signal %s\n' $((ended - 128)) >&2
        end_after "$coordinator" 0
    elif [ "$ended" != 0 ]; then
        printf 'all agents have ended; exit code %s, see %s/logs\n' "$ended" "$PWD" >&2
        end_after "$coordinator" 90
    fi
fi
exit_code_of "$coordinator"
code=$?
grace=30
[ "$code" = 0 ] || grace=5 # the coordinator may have failed before the agents knew of a run
end_after "$step" "$grace"
exit "$code"
