#!/usr/bin/env bash
# start_slurm.sh - bring up a real, throw-away SLURM cluster on one machine.
#
# For tests and CI.  No systemd.  Run as root.  From nothing to "all nodes
# idle" it takes about a second.  A cluster of the same options that is up
# already is left as it is.  Everything it writes lies under one folder ($ROOT), so that
# nothing in /etc is touched (except /etc/hosts, and only with --etc-hosts).
#
#   apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
#
#   ./start_slurm.sh --nodes 3 --gpus 8 --isolate ns
#   . /tmp/slurm-test/env.sh         # SLURM_CONF (and PATH, for the sacct stand-in)
#   srun -N3 --gres=gpu:2 hostname
#   ./stop_slurm.sh
#
# Options (each also has a default, so a bare ./start_slurm.sh works):
#   --nodes N          fake compute nodes n1..nN                          [1]
#   --cpus C           CPUs each node claims to have                      [16]
#   --mem MB           memory each node claims to have                    [64000]
#   --gpus G           fake GPUs per node (0: none)                       [8]
#   --accounting MODE  none  sacct answers "accounting is disabled"
#                      shim  no database; a stand-in `sacct` on PATH that
#                            answers from slurmctld's memory, enough
#                            for submitit                          [shim]
#   --isolate MODE     plain every slurmd on this host, one port each; all
#                            nodes share hostname, network and processes
#                      ns    each slurmd in its own network, UTS, PID and mount
#                            namespace: own hostname, own IP, own ports, own
#                            process table; `node_slurm.sh down n2` is then
#                            a power cut                                [plain]
#   --auth MODE        munge or none                                      [munge]
#   --proctrack MODE   linuxproc: follows parent pids, so a double-forked daemon
#                            outlives scancel
#                      cgroup: as on most clusters, nothing outlives scancel;
#                            tried with cgroup v1's freezer          [linuxproc]
#   --kill-wait S      KillWait: SIGTERM -> SIGKILL delay (SLURM's own: 30) [5]
#   --port-base P      first of the TCP ports used                        [26800]
#   --root DIR         where everything is written              [/tmp/slurm-test]
#   --set LINE         one more line for slurm.conf, for instance
#                      --set KillOnBadExit=1                      (repeatable)
#   --etc-hosts        (plain only) add n1..nN to /etc/hosts as 127.0.0.1
set -euo pipefail

ASKED="$*"
ROOT=${SLURM_TEST_ROOT:-/tmp/slurm-test}
NODES=1 CPUS=16 MEM=64000 GPUS=8 ACCT=shim ISOLATE=plain AUTH=munge PROCTRACK=linuxproc KILLWAIT=5 ETC_HOSTS=0 EXTRA=""
PORT=26800                 # +17 slurmctld, +20.. the nodes' slurmd
SUBNET=10.213.7            # only used inside namespaces this script makes
BRIDGE=slbr0

while [ $# -gt 0 ]; do
  case $1 in
    --nodes) NODES=$2; shift 2;;          --cpus) CPUS=$2; shift 2;;
    --mem) MEM=$2; shift 2;;              --gpus) GPUS=$2; shift 2;;
    --accounting) ACCT=$2; shift 2;;      --isolate) ISOLATE=$2; shift 2;;
    --auth) AUTH=$2; shift 2;;            --kill-wait) KILLWAIT=$2; shift 2;;
    --root) ROOT=$2; shift 2;;            --etc-hosts) ETC_HOSTS=1; shift;;
    --port-base) PORT=$2; shift 2;;
    --proctrack) PROCTRACK=$2; shift 2;;
    --set) EXTRA+=$2$'\n'; shift 2;;
    -h|--help) sed -n '2,/^set -euo/p' "$0" | sed '$d; s/^# \{0,1\}//'; exit 0;;
    *) echo "start_slurm.sh: unknown option $1" >&2; exit 2;;
  esac
done
case $ACCT in none|shim) ;; *) echo "bad --accounting $ACCT" >&2; exit 2;; esac
case $ISOLATE in plain|ns) ;; *) echo "bad --isolate $ISOLATE" >&2; exit 2;; esac
case $AUTH in munge|none) ;; *) echo "bad --auth $AUTH" >&2; exit 2;; esac
[ "$(id -u)" = 0 ] || { echo "start_slurm.sh: must run as root" >&2; exit 2; }

CTLD_PORT=$((PORT + 17)) SLURMD_PORT=$((PORT + 20))
for tool in slurmctld slurmd sinfo $([ "$AUTH" = munge ] && echo munged); do
  PATH=/usr/sbin:/sbin:$PATH command -v "$tool" > /dev/null || { echo "start_slurm.sh: no $tool here; see the apt-get lines at the top" >&2; exit 3; }
done
HERE=$(cd "$(dirname "$0")" && pwd)
HOST=$(hostname -s)
T0=$(date +%s.%N)
export PATH=/usr/sbin:/sbin:$PATH

# What is up already and answers is what was asked for, or it goes.
export SLURM_CONF=$ROOT/etc/slurm.conf
if [ "$(cat "$ROOT/.slurm-test" 2>/dev/null)" = "$ASKED" ] && [ -e "$ROOT/env.sh" ] &&
   [ "$(timeout 5 sinfo -h -N -p main -o %t 2>/dev/null | grep -cxE 'idle|mix|alloc|comp')" = "$NODES" ]; then
  echo "SLURM is up already"; echo ". $ROOT/env.sh"; exit 0
fi
# Only ever write to, and later remove, a folder that this script made.
[ -e "$ROOT/.slurm-test" ] && SLURM_TEST_ROOT=$ROOT "$HERE/stop_slurm.sh"
if [ -n "$(find "$ROOT" -mindepth 1 -maxdepth 1 ! -name log 2>/dev/null | head -1)" ]; then
  echo "start_slurm.sh: $ROOT is in use by something else" >&2; exit 2
fi
mkdir -p "$ROOT" && echo "$ASKED" > "$ROOT/.slurm-test"
mkdir -p "$ROOT"/{etc,log,run,spool,state,dev,bin}
chmod 755 "$ROOT" "$ROOT/run"

trap 'die "line $LINENO failed"' ERR
die() { echo "start_slurm.sh: $1; logs in $ROOT/log" >&2; tail -n 5 "$ROOT"/log/*.out "$ROOT"/log/*.log >&2 2>/dev/null || true; exit 1; }
# wait_for SECONDS COMMAND...: poll 20 times a second until it succeeds
wait_for() {
  local tries=$(( $1 * 20 )); shift
  for ((i = 0; i < tries; i++)); do "$@" >/dev/null 2>&1 && return 0; sleep 0.05; done
  return 1
}

# --- fake GPUs -------------------------------------------------------------
# slurmd insists on character devices (regular files and Count= without File=
# are refused or counted as 0), so make some that behave like /dev/null.  The
# digits at the end of the name become the CUDA_VISIBLE_DEVICES index.
GRES_NODE="" GRES_CONF=""
if [ "$GPUS" -gt 0 ]; then
  for ((g = 0; g < GPUS; g++)); do [ -e "$ROOT/dev/nvidia$g" ] || mknod "$ROOT/dev/nvidia$g" c 1 3; done
  range=$([ "$GPUS" = 1 ] && echo 0 || echo "[0-$((GPUS - 1))]")
  GRES_NODE="Gres=gpu:fake:$GPUS"
  GRES_CONF="AutoDetect=off
NodeName=n[1-$NODES] Name=gpu Type=fake File=$ROOT/dev/nvidia$range Flags=nvidia_gpu_env"
fi
printf '%s\n' "$GRES_CONF" > "$ROOT/etc/gres.conf"

# --- slurm.conf --------------------------------------------------------------
CTLD_ADDR=127.0.0.1
[ "$ISOLATE" = ns ] && CTLD_ADDR=$SUBNET.1

AUTH_LINES="AuthType=auth/none
CredType=cred/none
AuthInfo=cred_expire=5"
[ "$AUTH" = munge ] && AUTH_LINES="AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket=$ROOT/run/munge.socket,cred_expire=5"

ACCT_LINES="AccountingStorageType=accounting_storage/none"

NODE_LINES=""
for ((n = 1; n <= NODES; n++)); do
  if [ "$ISOLATE" = ns ]; then
    where="NodeHostname=n$n NodeAddr=$SUBNET.$((10 + n)) Port=$SLURMD_PORT"
  else
    where="NodeHostname=$HOST NodeAddr=127.0.0.1 Port=$((SLURMD_PORT + n))"
  fi
  NODE_LINES+="NodeName=n$n $where CPUs=$CPUS RealMemory=$MEM $GRES_NODE State=UNKNOWN"$'\n'
done

cat > "$ROOT/etc/slurm.conf" <<CONF
ClusterName=test
SlurmctldHost=$HOST($CTLD_ADDR)
SlurmctldPort=$CTLD_PORT
SlurmUser=root
SlurmdUser=root
# cred_expire is also how long a requeued job waits before it may start again
# (default 120 s, least 5 s); 5 keeps requeue tests short.
$AUTH_LINES
StateSaveLocation=$ROOT/state
SlurmdSpoolDir=$ROOT/spool/%n
SlurmctldPidFile=$ROOT/run/slurmctld.pid
SlurmdPidFile=$ROOT/run/slurmd-%n.pid
SlurmctldLogFile=$ROOT/log/slurmctld.log
SlurmdLogFile=$ROOT/log/slurmd-%n.log
# No CPU binding, and by default no cgroups: works in any VM or container.
ProctrackType=proctrack/$PROCTRACK
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
MailProg=/bin/true
# Let nodes claim more CPUs and memory than this machine has.
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
ReturnToService=2
KillWait=$KILLWAIT
SlurmdTimeout=10
# Finished jobs stay known to scontrol (and so to the sacct stand-in) this long.
MinJobAge=86400
MaxArraySize=10001
# submitit reads results from <folder>/<job id>; a new cluster that counted from
# 1 again would hand it the last cluster's results.
FirstJobId=$(( $(date +%s) % 50000000 ))
SchedulerParameters=bf_interval=1,sched_min_interval=0,batch_sched_delay=0
# Jobs in partition "low" are requeued when one in "main" needs their node.
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
$ACCT_LINES
$EXTRA
$NODE_LINES
PartitionName=main Nodes=ALL Default=YES PriorityTier=10 MaxTime=INFINITE State=UP PreemptMode=OFF
PartitionName=low  Nodes=ALL Default=NO  PriorityTier=1  MaxTime=INFINITE State=UP PreemptMode=REQUEUE GraceTime=5
CONF
[ -d /sys/fs/cgroup/freezer ] && cg=cgroup/v1 || cg=cgroup/v2
printf 'CgroupMountpoint=/sys/fs/cgroup\nCgroupPlugin=%s\nIgnoreSystemd=yes\n' $cg > "$ROOT/etc/cgroup.conf"
export SLURM_CONF=$ROOT/etc/slurm.conf

# --- env.sh ------------------------------------------------------------------
{
  echo "export SLURM_CONF=$SLURM_CONF"
  echo "export SLURM_TEST_ROOT=$ROOT"
  echo "# for node_slurm.sh and stop_slurm.sh: ISOLATE=$ISOLATE BRIDGE=$BRIDGE SUBNET=$SUBNET"
  [ "$ACCT" = shim ] && echo "export PATH=$ROOT/bin:\$PATH"
} > "$ROOT/env.sh"
rm -f "$ROOT/bin/sacct"
[ "$ACCT" = shim ] && install -m 755 "$HERE/sacct" "$ROOT/bin/sacct"

# --- munge: a private daemon with its own key and socket ---------------------
if [ "$AUTH" = munge ]; then
  [ -s "$ROOT/etc/munge.key" ] || { (umask 077; head -c 1024 /dev/urandom > "$ROOT/etc/munge.key"); }
  munged --force --key-file="$ROOT/etc/munge.key" --socket="$ROOT/run/munge.socket" \
         --pid-file="$ROOT/run/munged.pid" --log-file="$ROOT/log/munged.log" \
         --seed-file="$ROOT/state/munge.seed" 2>>"$ROOT/log/munged.log" || die "munged did not start"
fi

# --- network for --isolate ns ------------------------------------------------
if [ "$ISOLATE" = ns ]; then
  ip link add "$BRIDGE" type bridge 2>/dev/null || die "another cluster of kind ns is up ($BRIDGE exists)"
  touch "$ROOT/run/bridge"
  ip addr add "$SUBNET.1/24" dev "$BRIDGE"
  ip link set "$BRIDGE" up
  { echo "127.0.0.1 localhost"; echo "$SUBNET.1 $HOST"
    for ((n = 1; n <= NODES; n++)); do echo "$SUBNET.$((10 + n)) n$n"; done; } > "$ROOT/etc/hosts"
elif [ "$ETC_HOSTS" = 1 ]; then
  for ((n = 1; n <= NODES; n++)); do echo "127.0.0.1 n$n # slurm-test"; done >> /etc/hosts
fi

# --- controller and nodes ----------------------------------------------------
slurmctld -c > "$ROOT/log/slurmctld.out" 2>&1 || die "slurmctld did not start"

for ((n = 1; n <= NODES; n++)); do
  SLURM_TEST_ROOT=$ROOT "$HERE/node_slurm.sh" up "n$n" || die "node n$n did not start"
done

# "idle" exactly: "idle*" is a node that has not answered yet
all_idle() { [ "$(sinfo -h -N -p main -o %t | grep -cx idle)" = "$NODES" ]; }
wait_for 30 all_idle || { sinfo -N -l; die "nodes did not become idle"; }
printf 'SLURM %s up: %d node(s), %d fake GPU(s) each, accounting=%s isolate=%s auth=%s, in %.2f s\n' \
  "$(slurmctld -V | cut -d' ' -f2)" "$NODES" "$GPUS" "$ACCT" "$ISOLATE" "$AUTH" \
  "$(awk "BEGIN{print $(date +%s.%N) - $T0}")"
echo ". $ROOT/env.sh"
