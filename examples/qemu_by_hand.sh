#!/bin/sh
# Boots an image in a QEMU of your own, without `snapshotter vm run`.
#
#   examples/qemu_by_hand.sh IMAGE KERNEL INITRD UPPER-DIRECTORY
#
# KERNEL and INITRD are those of a Linux that has virtio-fs (and virtio-serial) built in or in its
# INITRD; the ones of `snapshotter vm setup` and `snapshotter vm initrd` start, but wait for a host
# that tells them what to do, so the INITRD here is one that mounts `image` and goes on from there:
#     mount -t virtiofs image /newroot && exec switch_root /newroot /sbin/init
set -eu
[ $# = 4 ] || { sed -n '2,9s/^# \{0,1\}//p' "$0" >&2; exit 2; }
image=$1 kernel=$2 initrd=$3 upper=$4

directory=$(mktemp -d)
trap 'kill "$back_end" 2>/dev/null || :; rm -rf "$directory"' EXIT

# The back end: it listens once it is ready, serves one VMM, and ends when that hangs up.
snapshotter virtiofs "$image" --socket "$directory/fs" --upper "$upper" &
back_end=$!
while [ ! -S "$directory/fs" ]; do
    kill -0 "$back_end" || exit 1
    sleep 0.05
done

# What matters: the guest's memory is a shared file, and the device is a vhost-user one.
accelerator=${ACCELERATOR:-kvm}
qemu-system-x86_64 -accel "$accelerator" -machine q35,memory-backend=memory -m 1G -smp 1 \
    -object memory-backend-memfd,id=memory,size=1G,share=on \
    -chardev "socket,id=fs,path=$directory/fs" \
    -device vhost-user-fs-pci,chardev=fs,tag=image,queue-size=1024 \
    -kernel "$kernel" -initrd "$initrd" -append 'console=ttyS0 quiet panic=-1' \
    -nodefaults -nographic -serial stdio -no-reboot
