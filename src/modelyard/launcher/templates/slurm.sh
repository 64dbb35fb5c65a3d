#!/bin/bash
@DIRECTIVES@
# Shortly before the time limit, SLURM sends SIGUSR1 to this script (B:): the run saves, and the job is requeued.
# A job that is cancelled, preempted or requeued by someone else gets SIGTERM: the run saves, and SLURM does the rest.
#SBATCH --signal=B:USR1@@GRACE_SECS@
#SBATCH --requeue
#SBATCH --open-mode=append

cd @WORKDIR@ || exit 2
# Only processes that know the secret join the run. It is made here, and srun passes it on in the environment.
if [ -z "${MODELYARD_CLUSTER_SECRET:-}${MODELYARD_CLUSTER_SECRET_FILE:-}" ]; then
    MODELYARD_CLUSTER_SECRET=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
    export MODELYARD_CLUSTER_SECRET
fi
export MODELYARD_PS=@PS@ MODELYARD_EVALUATOR=@EVALUATOR@ PYTHONUNBUFFERED=1
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi # srun no longer inherits it
max_restarts=@MAX_RESTARTS@

time_is_up='' terminated='' signalled='' nap=''
# The signal does not go to srun itself, which would kill its tasks.
forward() {
    signalled=1
    scancel --quiet --signal=TERM "$SLURM_JOB_ID"
    if [ -n "$nap" ]; then kill "$nap" 2>/dev/null; fi
}
trap 'time_is_up=1; forward' USR1
trap 'terminated=1; forward' TERM

# A trapped signal ends `wait` early, so this waits again.
await() {
    wait "$1"; status=$?
    while [ -n "$signalled" ]; do
        signalled=''
        wait "$1"; again=$?
        if [ "$again" -ne 127 ]; then status=$again; fi
    done
}

# The status of srun is the highest of its tasks. A user error (2) becomes 250, to outrank the failures that follow from it.
# Tasks are not killed when one fails: they notice it by themselves, and can finish saving.
task='trap : TERM; "$@"; status=$?; [ $status -eq 2 ] && status=250; exit $status'

restarts=0
while :; do
    srun --kill-on-bad-exit=0 --wait=0 --distribution=block bash -c "$task" task \
        @COMMAND@ &
    await $!
    case $status in
        0) exit 0 ;;
        250) echo "not restarted: a restart would repeat the error above" >&2; exit 2 ;;
    esac
    if [ -n "$terminated" ]; then exit 143; fi
    if [ -n "$time_is_up" ]; then break; fi
    if [ "$status" -eq 143 ] || [ "$status" -eq 130 ]; then exit "$status"; fi
    if [ "$restarts" -ge "$max_restarts" ]; then
        echo "status $status after $restarts restarts: giving up" >&2
        exit "$status"
    fi
    restarts=$((restarts + 1))
    delay=$((restarts < 6 ? 2 ** restarts : 60))
    echo "status $status: restart $restarts of $max_restarts in $delay s" >&2
    sleep "$delay" & nap=$!
    await "$nap"
    nap=''
    if [ -n "$terminated" ]; then exit 143; fi
    if [ -n "$time_is_up" ]; then break; fi
done
echo "the time limit is reached and the run is saved: requeueing" >&2
scontrol requeue "$SLURM_JOB_ID" || echo "SLURM did not requeue the job; submit it again to resume the run" >&2
exit 143
