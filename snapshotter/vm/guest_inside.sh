# The part of a guest's init that runs in the image: becomes the user and starts the command.
# The host's /command follows this text and calls these functions; it also has "environment", which
# runs its arguments with the command's environment.
# Programs of this shell (awk, env, …) are busybox's own, whatever the image has.

unable() {
    echo "$1" >&2
    exit "$2"
}

field() { echo "$2" | cut -d: -f"$1"; }

entry() { [ ! -r "$1" ] || awk -F: -v n="$2" '$1 == n || $3 == n { print; exit }' "$1"; }

# NAME|ID[:GROUP|ID] by the image's files. A user without a group has all groups of the files.
become() {
    user="${1%%:*}" group=""
    case "$1" in *:*) group="${1#*:}" ;; esac
    line="$(entry /etc/passwd "$user")"
    name="$(field 1 "$line")" uid="$(field 3 "$line")" gid="$(field 4 "$line")"
    HOME="$(field 6 "$line")" uid="${uid:-$user}" gid="${gid:-0}" HOME="${HOME:-/}"
    if [ -n "$group" ]; then
        name=""
        gid="$(field 3 "$(entry /etc/group "$group")")" gid="${gid:-$group}"
    fi
    case "$uid" in *[!0-9]*) unable "user $user is not in the image's /etc/passwd; give a number" 125 ;; esac
    case "$gid" in *[!0-9]*) unable "group $group is not in the image's /etc/group; give a number" 125 ;; esac
}

enter() {
    [ -d "$1" ] || mkdir -p "$1"
    cd "$1" || unable "workdir $1 cannot be entered" 125
}

# pick NAME PATH…: the first that can be executed becomes $program.
pick() {
    wanted="$1" status=127 reason="is not in the image"
    shift
    for program; do
        [ -f "$program" ] || continue
        [ -x "$program" ] && return
        status=126 reason="cannot be executed: it has no x bit"
    done
    unable "$wanted $reason" "$status"
}

# start ARGUMENT…: $program, with what the host's "environment" function sets. setuid comes last.
start() {
    if [ -n "$name" ]; then
        environment start-stop-daemon -S -n no.such.name -c "$name:$gid" -a "$program" -- "$@"
    else
        environment nsenter -S "$uid" -G "$gid" "$program" "$@"
    fi
}
