#!/bin/busybox sh
# The first process of a guest: mounts the image, runs the one command, tells its exit status.
#
# The host writes /settings and /command for each run. On the port "status" it is told, a line each:
#     ready | failed TEXT | exit STATUS
# and may say:
#     signal NUMBER | done
# Nothing but the command's own output goes to the ports or the terminal that are the command's; an
# output port ends with $end_mark, for a guest cannot close one in a way that its host sees.

end() {
    echo "$*" >&3
    [ "$1" = failed ] || wait_for_host
    kill -9 -1 2>/dev/null # what the command left behind; never this process
    cd /
    sync
    umount -a -r -t virtiofs,overlay,ext4 2>/dev/null
    reboot -f
}

fail() { end failed "$@"; }

# The host has all output once it has both marks; before that nothing may be torn down.
wait_for_host() {
    [ -n "$terminal" ] || echo -n "$end_mark" | tee "$errors" >"$output"
    while [ ! -e /done ]; do sleep 0.01; done
}

# The device of a port; its name comes from the host some time after the device.
port() {
    for attempt in $(seq 500); do
        for device in /sys/class/virtio-ports/*; do
            if [ "$(cat "$device/name" 2>/dev/null)" = "snapshotter.$1" ]; then
                echo "/dev/${device##*/}"
                return
            fi
        done
        sleep 0.01
    done
}

begin() {
    /bin/busybox mount -t proc proc /proc # busybox finds itself there from now on
    mount -t sysfs sysfs /sys
    mount -t devtmpfs dev /dev
    for module in /modules/*.ko; do
        [ -e "$module" ] || continue
        insmod "$module" || trouble="the kernel module ${module##*/} cannot be loaded"
    done
    exec 3<>"$(port status)" || reboot -f # nobody can be told
    echo ready >&3
    [ -z "$trouble" ] || fail "$trouble"
    if [ -n "$terminal" ]; then
        input=/dev/hvc0 output=/dev/hvc0 errors=/dev/hvc0
        exec 4<>"$input" # open for good: a terminal forgets its settings at its last close
        stty $terminal <&4
    else
        input="$(port stdin)" output="$(port stdout)" errors="$(port stderr)"
    fi
}

mount_image() {
    mkdir -p /image
    case "$view" in
        plain)
            mount -t virtiofs -o "$options" image /image ||
                fail "virtio-fs: the image cannot be mounted"
            ;;
        assist) mount_assisted ;;
    esac
}

# The guest's kernel has the names from the metadata image; only contents come from the host.
mount_assisted() {
    mkdir -p /names /contents /upper
    mount -t erofs -o ro /dev/vda /names || fail "EROFS: the metadata image cannot be mounted"
    mount -t virtiofs -o ro contents /contents || fail "virtio-fs: the contents cannot be mounted"
    case "$upper" in
        memory) mount -t tmpfs -o mode=755 upper /upper ;;
        disk) mount -t ext4 /dev/vdb /upper ;;
    esac || fail "the upper ($upper) cannot be mounted"
    mkdir -p /upper/upper /upper/work
    mount -t overlay -o "$options,lowerdir=/names::/contents,upperdir=/upper/upper,workdir=/upper/work" \
        image /image || fail "overlayfs cannot compose the image from its parts"
}

mount_surroundings() {
    cd /image || fail "the image cannot be entered"
    mkdir -p proc sys dev 2>/dev/null
    mount -t proc -o nosuid,nodev,noexec proc proc &&
        mount -t sysfs -o nosuid,nodev,noexec sysfs sys &&
        mount -t devtmpfs -o nosuid dev dev || fail "the image has no place for /proc, /sys, /dev"
    mkdir -p dev/pts dev/shm
    mount -t devpts -o nosuid,noexec,newinstance,ptmxmode=0666,mode=0620,gid=5 devpts dev/pts
    mount -t tmpfs -o nosuid,nodev shm dev/shm
    ln -sf pts/ptmx dev/ptmx
    ln -sfn /proc/self/fd dev/fd
    ln -sf fd/0 dev/stdin
    ln -sf fd/1 dev/stdout
    ln -sf fd/2 dev/stderr
    hostname "$hostname"
    ip link set lo up
}

# What the host says goes to the command, the other way than its input.
listen() {
    while read -r word number <&3; do
        case "$word" in
            signal) kill -"$number" -- "-$1" ;;
            done) touch /done ;;
        esac
    done
}

. /settings
begin
mount_image
mount_surroundings
setsid ${terminal:+-c} chroot /image sh -c "$(cat /inside /command)" \
    <"$input" >"$output" 2>"$errors" 3>&- 4>&- &
command=$!
listen "$command" 2>/dev/null &
wait "$command"
end exit $?
