#!/bin/bash
# Shortly before the time limit, SLURM sends SIGUSR1 to this script (B:): the run saves, and the job is requeued.
# A job that is cancelled, preempted or requeued by someone else gets SIGTERM: the run saves, and SLURM does the rest.
#SBATCH --signal=B:USR1@@GRACE_SECS@
#SBATCH --requeue
#SBATCH --open-mode=append
@DIRECTIVES@

cd @WORKDIR@ || exit 2
# Only processes that know the secret join the run. It is made here, and srun passes it on in the environment.
if [ -z "${MODELYARD_CLUSTER_SECRET:-}${MODELYARD_CLUSTER_SECRET_FILE:-}" ]; then
    MODELYARD_CLUSTER_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export MODELYARD_CLUSTER_SECRET
fi
export MODELYARD_PS=@PS@ MODELYARD_EVALUATOR=@EVALUATOR@ PYTHONUNBUFFERED=1
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi # srun no longer inherits it
max_restarts=@MAX_RESTARTS@
# The id of one task of an array may be that of the whole array.
export MODELYARD_JOB="${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}"
MODELYARD_JOB=${MODELYARD_JOB:-$SLURM_JOB_ID}

time_is_up='' terminated='' signalled='' nap='' killer=''
# The signal does not go to srun itself, which would kill its tasks.
forward() {
    signalled=1
    scancel --quiet --signal=TERM "$MODELYARD_JOB"
    if [ -n "$nap" ]; then kill "$nap" 2>/dev/null; fi
}
trap 'time_is_up=1; forward' USR1
trap 'terminated=1; forward' TERM
# A task sends SIGUSR2 when all must restart. The others exit by themselves; for one that is frozen, srun is ended, and kills it.
kill_the_rest() {
    sleep 60 & rest=$!
    trap 'kill "$rest"' TERM
    wait "$rest" && kill -TERM "$step"
}
trap 'signalled=1; if [ -z "$killer" ]; then kill_the_rest & killer=$!; fi' USR2
trap 'if [ -n "$killer" ]; then kill "$killer" 2>/dev/null; fi' EXIT

# A trapped signal ends `wait` early, so this waits again.
await() {
    wait "$1"; status=$?
    while [ -n "$signalled" ]; do
        signalled=''
        wait "$1"; again=$?
        if [ "$again" -ne 127 ]; then status=$again; fi
    done
}

# The status of srun is the highest of its tasks, so the cause of a failure must outrank what follows from it:
# a user error (2) becomes 250, a crash 249, a kill from outside 248. A kill by the kernel for lack of memory is a crash.
# Tasks are not killed when one fails: they notice it by themselves, and can finish saving.
# In a heterogeneous job, tasks without a GPU of their own do not use those of others.
task='trap : TERM
memory_kills() { grep -s "^oom_kill " /proc/vmstat; }
if [ -n "${SLURM_HET_SIZE:-}" ]; then export CUDA_VISIBLE_DEVICES="${CUDA_VISIBLE_DEVICES:--1}"; fi
before=$(memory_kills)
"$@"; status=$?
how="exited with status $status" rank=249
case $status in
    0 | 130 | 143) exit $status ;;
    2) rank=250 ;;
    75) rank=75 ;;
    137) how="was killed by SIGKILL"
        if [ -z "$before" ]; then how="$how (from outside, or out of memory)"
        elif [ "$(memory_kills)" != "$before" ]; then how="$how: out of memory"
        else how="$how from outside (not for lack of memory)" rank=248; fi ;;
esac
case $status in 2 | 75) ;; *) echo "task ${SLURM_PROCID:-} on $(uname -n) $how" >&2 ;; esac
# Without the coordinator, or where one has lost another, all end. Training goes on without an evaluator, or a worker of
# parameter servers.
case $rank.${SLURM_PROCID:-0} in 75.* | 250.* | *.0) scancel --quiet --batch --signal=USR2 "$MODELYARD_JOB" ;; esac
exit $rank'

restarts=0 kills=0
while :; do
    if [ -n "$killer" ]; then kill "$killer" 2>/dev/null; killer=''; fi
    srun @GROUPS@--kill-on-bad-exit=0 --wait=0 --distribution=block bash -c "$task" task \
        @COMMAND@ &
    step=$!
    await "$step"
    if [ -n "$killer" ] && ! kill -0 "$killer" 2>/dev/null; then
        echo "a task had not ended 60 s after another had failed: killed" >&2
        status=137
    fi
    case $status in
        0) exit 0 ;;
        250) echo "not restarted: a restart would repeat the error above" >&2; exit 2 ;;
    esac
    if [ -n "$terminated" ]; then exit 143; fi
    if [ -n "$time_is_up" ]; then break; fi
    if [ "$status" -eq 143 ] || [ "$status" -eq 130 ]; then exit "$status"; fi
    if [ "$status" -eq 248 ] && [ "$max_restarts" -gt 0 ]; then
        kills=$((kills + 1)) what="a task was killed from outside: restart"
    elif [ "$restarts" -ge "$max_restarts" ]; then
        echo "status $status after $restarts restarts: giving up" >&2
        if [ "$status" -ge 248 ]; then exit 1; fi
        exit "$status"
    else
        restarts=$((restarts + 1)) what="status $status: restart $restarts of $max_restarts"
    fi
    delay=$((restarts + kills < 6 ? 2 ** (restarts + kills) : 60))
    echo "$what in $delay s" >&2
    sleep "$delay" & nap=$!
    await "$nap"
    nap=''
    if [ -n "$terminated" ]; then exit 143; fi
    if [ -n "$time_is_up" ]; then break; fi
done
echo "the time limit is reached and the run is saved: requeueing" >&2
scontrol requeue "$MODELYARD_JOB" || echo "SLURM did not requeue the job; submit it again to resume the run" >&2
exit 143
