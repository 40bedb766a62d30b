#!/bin/sh
# Runs an item of docker/gpu-items.mk, in the state folder, and writes the results of all items anew.
# Usage: gpu_item.sh NAME MINUTES WHAT [needs=device|PROGRAM|PACKAGE]… COMMAND…
# NAME becomes a file, the stamp, when the item is finished. It does not when the end of the call cut the item, or when
# something that it needs is not here: then the next call runs it.
# In the environment: ROOT of the clone, OUTPUT, ITEMS, DRY and PY as in docker/gpu.mk, TIME and LEAST (seconds that a call
# takes, and that an item needs to begin), DEADLINE (seconds since 1970).
set -eu
name=$1 minutes=$2 what=$3
shift 3

# Every file is replaced by a rename, so that a killed call leaves whole ones.
replace() { cat > "$1.$$" && mv "$1.$$" "$1"; }

markdown() {
    echo "# The first hour on a GPU${DRY:+: no device here, toy sizes on a CPU}"
    printf '\n| item | result | s | what it finds out |\n|---|---|---:|---|\n'
    for item in $ITEMS; do
        if [ -e "$item.d/status" ]; then
            { read -r status; read -r seconds; read -r what; } < "$item.d/status"
            echo "| $item | $status | $seconds | $what |"
        else
            echo "| $item | waiting | | |"
        fi
    done
    for item in $ITEMS; do
        [ -e "$item.d/log" ] || continue
        printf '\n## %s: %s\n\n' "$item" "$(sed -n 3p "$item.d/status" 2> /dev/null)"
        if cat "$item.d"/*.md > /dev/null 2>&1; then
            sed -e '/^# /d' -e 's/^#/##/' "$item.d"/*.md
        else
            printf '```\n%s\n```\n' "$(tail -n 30 "$item.d/log")"
        fi
    done
}

# finish STATUS EXIT_CODE SECONDS: the item's line of gpu.jsonl, its row of gpu.md.
finish() {
    mkdir -p "$name.d"
    printf '%s\n%s\n%s\n' "$1" "$3" "$what" | replace "$name.d/status"
    record=$(cat "$name.d"/*.json 2> /dev/null | tr -d '\n')
    printf '{"item": "%s", "what": "%s", "status": "%s", "exit_code": %s, "seconds": %s, "ended": "%s", "record": %s}\n' \
        "$name" "$what" "$1" "${2:-null}" "${3:-null}" "$(date -u +%FT%TZ)" "${record:-null}" | replace "$name.d/line"
    (
        flock 9
        for item in $ITEMS; do cat "$item.d/line" 2> /dev/null || true; done | replace "$OUTPUT/gpu.jsonl"
        markdown | replace "$OUTPUT/gpu.md"
    ) 9> .writing
    echo "$(date +%T)  $name: $1"
}

while [ "${1#needs=}" != "$1" ]; do
    need=${1#needs=}
    shift
    if [ "$need" = device ]; then
        if [ -n "$DRY" ]; then finish "no device" "" ""; exit; fi
    elif ! command -v "$need" > /dev/null && ! "$PY" -c "import importlib.util as u; exit(not u.find_spec('$need'))"; then
        finish "left out: $need is not here" "" ""
        exit
    fi
done

# Three calls were killed while it ran: it may hang the device.
if [ "$(cat "$name.tries" 2> /dev/null || echo 0)" -ge 3 ]; then finish "given up" "" ""; echo "given up" > "$name"; exit; fi

limit=$(awk "BEGIN {print int(60 * $minutes)}")
[ "$limit" -lt "$TIME" ] || limit=$((TIME - LEAST))
left=$((DEADLINE - $(date +%s)))
[ "$left" -ge "$LEAST" ] || exit 0
[ "$left" -lt "$limit" ] && allowed=$left || allowed=$limit
case " $* " in *" benchmark "*)
    # Four fifths of its time, so that it can write its tables.
    set -- "$@" --output "$(realpath --relative-to="$ROOT" "$name.d")" --minutes "$(awk "BEGIN {print $limit / 75}")" ;;
esac
rm -rf "$name.d"
mkdir "$name.d"
printf 'running\n\n%s\n' "$what" > "$name.d/status"
echo $(($(cat "$name.tries" 2> /dev/null || echo 0) + 1)) > "$name.tries"
echo "$(date +%T)  $name: $what"
began=$(date +%s)
code=0
# SIGKILL goes to the item's whole process group.
(cd "$ROOT" && exec timeout --signal=KILL "$allowed" "$@") > "$name.d/log" 2>&1 < /dev/null &
process=$!
trap 'kill -s KILL -- "-$process"; exit 130' HUP INT TERM
wait "$process" || code=$?
seconds=$(($(date +%s) - began))
rm -f "$name.tries"
case $code in
    0) status=measured ;;
    *) status="failed ($code)" ;;
esac
if [ "$code" = 137 ] && [ "$seconds" -ge "$allowed" ]; then
    [ "$allowed" -lt "$limit" ] && status="cut by the end of the call" || status="over its time"
fi
finish "$status" "$code" "$seconds"
[ "$status" = "cut by the end of the call" ] || echo "$status" > "$name"
