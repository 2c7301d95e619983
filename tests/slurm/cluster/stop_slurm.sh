#!/usr/bin/env bash
# stop_slurm.sh - end what start_slurm.sh started, and remove its folder.
# Every process is ended by the id that start_slurm.sh recorded.
#   SLURM_TEST_ROOT=DIR ./stop_slurm.sh [--keep-logs]
set -uo pipefail
ROOT=${SLURM_TEST_ROOT:-/tmp/slurm-test}
KEEP=0; [ "${1:-}" = --keep-logs ] && KEEP=1
[ -e "$ROOT/.slurm-test" ] || { echo "nothing to stop under $ROOT"; exit 0; }
export SLURM_CONF=$ROOT/etc/slurm.conf PATH=/usr/sbin:/sbin:$PATH
run=$ROOT/run

# A zombie counts as gone: in a container PID 1 may take seconds to reap it.
running() { case $(sed 's/.*) //' "/proc/$1/stat" 2>/dev/null) in ""|Z*|X*) return 1;; esac; }
alive() { [ -s "$1" ] && running "$(cat "$1")"; }
end() {        # end PIDFILE [SIGNAL]: signal, wait up to 10 s, then KILL
  alive "$1" || { rm -f "$1"; return 0; }
  local pid; pid=$(cat "$1")
  kill -"${2:-TERM}" "$pid" 2>/dev/null
  for ((i = 0; i < 200; i++)); do running "$pid" || { rm -f "$1"; return 0; }; sleep 0.05; done
  kill -KILL "$pid" 2>/dev/null; rm -f "$1"
}

# Jobs first, so that no slurmstepd outlives its slurmd.
if alive "$run/slurmctld.pid"; then
  jobs=$(timeout 5 squeue -h -o %A | sort -u)
  if [ -n "$jobs" ]; then
    timeout 5 scancel --full --signal=KILL $jobs 2>/dev/null
    timeout 5 scancel $jobs 2>/dev/null
    for ((i = 0; i < 100; i++)); do [ -z "$(timeout 5 squeue -h)" ] && break; sleep 0.1; done
  fi
fi
if grep -q 'ISOLATE=ns' "$ROOT/env.sh" 2>/dev/null; then
  # (there, slurmd's own pid file holds a pid of the node's namespace: not ours to signal)
  for f in "$run"/n*.pid; do [ -e "$f" ] && end "$f" KILL; done
else
  for f in "$run"/slurmd-*.pid; do [ -e "$f" ] && end "$f"; done
fi
end "$run/slurmctld.pid"; end "$run/munged.pid"
if [ -e "$run/bridge" ]; then
  for ns in $(ip netns list 2>/dev/null | awk '/^slurm-n/{print $1}'); do ip netns del "$ns"; done
  ip link show slbr0 > /dev/null 2>&1 && ip link del slbr0
fi
grep -q '# slurm-test$' /etc/hosts && { grep -v '# slurm-test$' /etc/hosts > /tmp/.hosts.$$; cat /tmp/.hosts.$$ > /etc/hosts; rm -f /tmp/.hosts.$$; }
for d in /sys/fs/cgroup/*/slurm_n[0-9]*; do          # --proctrack cgroup
  [ -d "$d" ] && find "$d" -depth -type d -exec rmdir {} + 2>/dev/null
done
rm -rf "${ROOT:?}"/{etc,run,spool,state,dev,bin,env.sh,.slurm-test}
[ $KEEP = 1 ] || rm -rf "${ROOT:?}/log"
rmdir "$ROOT" 2>/dev/null
echo "SLURM stopped"
