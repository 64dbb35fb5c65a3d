#!/bin/bash
@DIRECTIVES@
# Shortly before the job's time is over, SLURM sends this script (B:) SIGUSR1: the run saves, and the job goes back into
# the queue. A job that is cancelled, preempted or requeued by others gets SIGTERM: the run saves, the rest is SLURM's.
#SBATCH --signal=B:USR1@@GRACE_SECS@
#SBATCH --requeue
#SBATCH --open-mode=append

cd @WORKDIR@ || exit 2
export MODELYARD_PS=@PS@ MODELYARD_EVALUATOR=@EVALUATOR@ PYTHONUNBUFFERED=1
if [ -n "${SLURM_CPUS_PER_TASK:-}" ]; then export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK; fi # srun no longer takes it over
max_restarts=@MAX_RESTARTS@

time_is_up='' told_to_stop='' signalled='' nap=''
# Not to srun itself: it would kill its tasks.
forward() {
    signalled=1
    scancel --quiet --signal=TERM "$SLURM_JOB_ID"
    if [ -n "$nap" ]; then kill "$nap" 2>/dev/null; fi
}
trap 'time_is_up=1; forward' USR1
trap 'told_to_stop=1; forward' TERM

# A trapped signal ends `wait` early: then it waits again.
await() {
    wait "$1"; status=$?
    while [ -n "$signalled" ]; do
        signalled=''
        wait "$1"; again=$?
        if [ "$again" -ne 127 ]; then status=$again; fi
    done
}

# srun's status is the highest of its tasks': a mistake (2) becomes 250, so that it outranks what it does to the others.
# Tasks are not killed when one fails: they notice by themselves, and whoever is saving can finish.
task='trap : TERM; "$@"; status=$?; [ $status -eq 2 ] && status=250; exit $status'

restarts=0
while :; do
    srun --kill-on-bad-exit=0 --wait=0 --distribution=block bash -c "$task" task \
        @COMMAND@ &
    await $!
    case $status in
        0) exit 0 ;;
        250) echo "a mistake that another start would repeat; see above" >&2; exit 2 ;;
    esac
    if [ -n "$told_to_stop" ]; then exit 143; fi
    if [ -n "$time_is_up" ]; then break; fi
    if [ "$status" -eq 143 ] || [ "$status" -eq 130 ]; then exit "$status"; fi
    if [ "$restarts" -ge "$max_restarts" ]; then
        echo "status $status after $restarts restarts: given up" >&2
        exit "$status"
    fi
    restarts=$((restarts + 1))
    delay=$((restarts < 6 ? 2 ** restarts : 60))
    echo "status $status: restart $restarts of $max_restarts in $delay s" >&2
    sleep "$delay" & nap=$!
    await "$nap"
    nap=''
    if [ -n "$told_to_stop" ]; then exit 143; fi
    if [ -n "$time_is_up" ]; then break; fi
done
echo "the time is up and the run is saved: back into the queue" >&2
scontrol requeue "$SLURM_JOB_ID" || echo "SLURM does not take it back; submit it again to go on" >&2
exit 143
