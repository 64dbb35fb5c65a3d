# Status 75 means that another process was lost, or that the lock of a dead one in cloud storage is not stale yet: this
# process restarts, after growing pauses. Any other status ends the container.
trap 'stopped=1; kill -TERM "$pid" 2>/dev/null' TERM
restarts=0
while :; do
    "$@" & pid=$!
    if [ -n "$stopped" ]; then kill -TERM "$pid" 2>/dev/null; fi
    wait "$pid"; status=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; status=$?; done
    if [ "$status" -ne 75 ] || [ -n "$stopped" ] || [ "$restarts" -ge @MAX_RESTARTS@ ]; then exit "$status"; fi
    restarts=$((restarts + 1))
    sleep $((5 * (restarts < 12 ? restarts : 12)))
    if [ -n "$stopped" ]; then exit 143; fi
done
