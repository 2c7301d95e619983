#!/usr/bin/env bash
# node_slurm.sh up|down NODE - start a compute node of the test cluster, or cut
# its power.  start_slurm.sh calls it with "up"; tests call it with "down" to see
# what a lost node does, and with "up" to bring the node back.
#   down, --isolate ns:    every process on the node is killed at once
#   down, --isolate plain: only its slurmd is killed; job processes live on
set -euo pipefail
ROOT=${SLURM_TEST_ROOT:-/tmp/slurm-test}
what=$1 node=$2 n=${2#n}
export SLURM_CONF=$ROOT/etc/slurm.conf PATH=/usr/sbin:/sbin:$PATH
# shellcheck disable=SC2046
eval $(sed -n 's/^# for node_slurm.sh.*: //p' "$ROOT/env.sh")     # ISOLATE BRIDGE SUBNET

case $what in
up)
  mkdir -p "$ROOT/spool/$node"
  if [ "$ISOLATE" = plain ]; then
    exec slurmd -N "$node" > "$ROOT/log/slurmd-$node.out" 2>&1
  fi
  if [ ! -e "/run/netns/slurm-$node" ]; then
    ip netns add "slurm-$node"
    ip link add "slv$n" type veth peer name eth0 netns "slurm-$node"
    ip link set "slv$n" master "$BRIDGE" up
    ip -n "slurm-$node" addr add "$SUBNET.$((10 + n))/24" dev eth0
    ip -n "slurm-$node" link set eth0 up
    ip -n "slurm-$node" link set lo up
  fi
  # A small shell is the node's PID 1, as init would be: it reaps orphans, and
  # everything on the node dies with it.  munged's socket
  # is a file, so it works across the namespaces.
  setsid nsenter --net="/run/netns/slurm-$node" \
    unshare --uts --pid --mount --fork --mount-proc --kill-child=KILL \
    bash -c "hostname $node; mount --bind $ROOT/etc/hosts /etc/hosts
             slurmd -D -N $node & while :; do wait; sleep 0.2; done" \
    > "$ROOT/log/slurmd-$node.out" 2>&1 < /dev/null &
  echo $! > "$ROOT/run/$node.pid"
  ;;
down)
  if [ "$ISOLATE" = plain ]; then kill -KILL "$(cat "$ROOT/run/slurmd-$node.pid")"
  else kill -KILL "$(cat "$ROOT/run/$node.pid")"; rm -f "$ROOT/run/$node.pid"; fi
  ;;
*) echo "usage: node_slurm.sh up|down NODE" >&2; exit 2;;
esac
