#!/bin/busybox sh
# The guest's first process: gives the tests what they expect of a machine, runs them, says how they
# ended, and powers off. Kernel and init write to the console (ttyS0), the tests to
# ttyS1, with their complaints on ttyS2.
/bin/busybox --install -s /bin
export PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/root
# Nobody else is on this machine: tests that take it over as a whole run here, and only here.
export DATAPLANE_WHOLE_MACHINE=1

mount -t devtmpfs dev /dev
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t tmpfs tmp /tmp
mount -t tmpfs run /run
mount -t cgroup2 cgroup2 /sys/fs/cgroup
mount -t bpf bpf /sys/fs/bpf
mount -t debugfs debug /sys/kernel/debug 2>/dev/null
ln -s /proc/self/fd /dev/fd

while read -r module; do
    insmod "/modules/$module.ko" || echo "init: cannot load module $module"
done < /modules/order

hostname guest
ip link set lo up
# The guest's own line ends with "\n" alone, and nobody types.
stty -F /dev/ttyS1 raw -echo
stty -F /dev/ttyS2 raw -echo

sh /task </dev/null >/dev/ttyS1 2>/dev/ttyS2
status=$?
printf '\n%s %d\n' "$(cat /marker)" "$status" >/dev/ttyS1
sync
poweroff -f
