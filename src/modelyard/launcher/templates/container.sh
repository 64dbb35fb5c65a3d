# Status 75 means that another process was lost: this one restarts and waits for it. Any other status ends the container.
trap 'stopped=1; kill -TERM "$pid" 2>/dev/null' TERM
restarts=0
while :; do
    "$@" & pid=$!
    if [ -n "$stopped" ]; then kill -TERM "$pid" 2>/dev/null; fi
    wait "$pid"; status=$?
    while kill -0 "$pid" 2>/dev/null; do wait "$pid"; status=$?; done
    if [ "$status" -ne 75 ] || [ -n "$stopped" ] || [ "$restarts" -ge @MAX_RESTARTS@ ]; then exit "$status"; fi
    restarts=$((restarts + 1))
    sleep 5
    if [ -n "$stopped" ]; then exit 143; fi
done
