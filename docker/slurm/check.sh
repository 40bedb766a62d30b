#!/usr/bin/env bash
# Runs docker/slurm/train.sbatch on a Slurm cluster of one node that it starts on loopback: a training of two processes is
# pre-empted by a signal, requeued and resumed, and must end with the weights of a run that nothing disturbed. A
# cancelled job must stay ended, and a process that dies must end the other one.
# Needs root and Debian's slurmctld, slurmd, slurm-client and munge; touches none of their own settings.
# Usage: docker/slurm/check.sh
#   ANLIT  the command (default: .venv/bin/anlit, made by `make install`)
#   WORK   scratch folder (default: a new one, removed at the end)
set -euo pipefail
cd "$(dirname "$0")/../.."
repository=$PWD
ANLIT=$(realpath "${ANLIT:-.venv/bin/anlit}")
owned=$([[ -n ${WORK:-} ]] || mktemp -d)
WORK=${WORK:-$owned}
mkdir -p "$WORK"/{spool,state,munge,data/texts,runs}
export SLURM_CONF=$WORK/slurm.conf PATH=$PATH:/usr/sbin
STEPS=120
LIMIT=600 # seconds for a job to reach a state

for tool in munged slurmctld slurmd sbatch; do
    command -v "$tool" > /dev/null || {
        echo "docker/slurm/check.sh needs $tool: apt-get install munge slurmctld slurmd slurm-client" >&2
        exit 2
    }
done

stop() {
    # Processes outlive slurmd, so first the jobs, the batch shells with them.
    squeue --noheader --format=%A 2> /dev/null | xargs --no-run-if-empty scancel --full --signal=KILL || true
    for name in slurmd slurmctld munged; do end_daemon "$name"; done
    rm -rf ${owned:+"$owned"}
}

# end_daemon NAME: ends it and waits, for munged writes its seed into the scratch folder last.
end_daemon() {
    local pid
    [[ -s $WORK/$1.pid ]] || return 0
    pid=$(cat "$WORK/$1.pid")
    kill "$pid" 2> /dev/null || return 0
    for _ in $(seq 100); do
        kill -0 "$pid" 2> /dev/null || return 0
        sleep 0.1
    done
}
trap stop EXIT

free_port() { python3 -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])'; }

write_configuration() {
    cat > "$SLURM_CONF" << CONF
ClusterName=check
SlurmctldHost=$(hostname -s)(127.0.0.1)
SlurmctldPort=$(free_port)
SlurmdPort=$(free_port)
SlurmUser=$(id -un)
SlurmdUser=$(id -un)
AuthType=auth/munge
CredType=cred/munge
# cred_expire is also how long a requeued job waits: 120 s by default.
AuthInfo=socket=$WORK/munge/socket,cred_expire=5
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
AccountingStorageType=accounting_storage/none
JobAcctGatherType=jobacct_gather/none
MpiDefault=none
ReturnToService=2
SlurmdParameters=config_overrides
StateSaveLocation=$WORK/state
SlurmdSpoolDir=$WORK/spool
SlurmctldPidFile=$WORK/slurmctld.pid
SlurmdPidFile=$WORK/slurmd.pid
SlurmctldLogFile=$WORK/slurmctld.log
SlurmdLogFile=$WORK/slurmd.log
GresTypes=gpu
NodeName=$(hostname -s) NodeAddr=127.0.0.1 CPUs=2 CoresPerSocket=2 Gres=gpu:2 State=UNKNOWN
PartitionName=check Nodes=ALL Default=YES State=UP
CONF
    # Two GPUs that are none: the script asks for GPUs, and what it asks for is part of the check.
    printf 'Name=gpu File=/dev/null\nName=gpu File=/dev/zero\n' > "$WORK/gres.conf"
}

start_cluster() {
    head -c 1024 /dev/urandom > "$WORK/munge/key"
    chmod 400 "$WORK/munge/key"
    chmod 755 "$WORK"
    munged --force --key-file="$WORK/munge/key" --socket="$WORK/munge/socket" --pid-file="$WORK/munged.pid" \
        --log-file="$WORK/munge/log" --seed-file="$WORK/munge/seed"
    slurmctld
    slurmd
    for _ in $(seq 30); do
        [[ $(sinfo --noheader --format=%t 2> /dev/null) != idle ]] || return 0
        sleep 1
    done
    echo "the cluster does not come up: see $WORK/slurmctld.log and $WORK/slurmd.log (WORK=DIR keeps them)" >&2
    tail -n 5 "$WORK"/slurm*.log >&2
    return 1
}

# submit NAME [COMMAND]: the job of one run; prints its number. Two processes of one core, on CPUs with gloo.
submit() {
    (cd "$WORK" && ANLIT="${2:-$ANLIT}" OMP_NUM_THREADS=1 sbatch --parsable --job-name="$1" --ntasks-per-node=2 --cpus-per-task=1 \
        --gpus-per-node=2 --time=10 "$repository/docker/slurm/train.sbatch" --config "$repository/docker/check.yaml" \
        --trainer.strategy=ddp --trainer.max_steps="$STEPS" --checkpoint_every_n_steps=20 --run_dir "runs/$1")
}

state() { scontrol show job "$1" | sed -n 's/.*JobState=\([A-Z]*\).*/\1/p'; }

# wait_for CONDITION…: until the command succeeds.
wait_for() {
    for _ in $(seq "$LIMIT"); do
        ! "$@" || return 0
        sleep 1
    done
    echo "waited $LIMIT s in vain for: $*; the jobs wrote:" >&2
    cat "$WORK"/*.out >&2
    return 1
}
has_ended() { [[ $(state "$1") =~ ^(COMPLETED|FAILED|CANCELLED|TIMEOUT|NODE_FAIL)$ ]]; }

# Fails unless the job ended well.
finish() {
    wait_for has_ended "$1"
    scontrol show job "$1" | grep -E -o 'JobState=\S+|Restarts=\S+|ExitCode=\S+' | tr '\n' ' '
    echo
    [[ $(state "$1") == COMPLETED ]]
}

write_configuration
start_cluster
sinfo
cp "$(python3 -c 'import email; print(email.__path__[0])')"/*.py "$WORK/data/texts"

echo "== undisturbed"
undisturbed=$(submit undisturbed)
finish "$undisturbed"

echo "== pre-empted once it has written a checkpoint"
preempted=$(submit preempted)
wait_for test -e "$WORK/runs/preempted/checkpoints/last.ckpt"
echo "last.ckpt is there: SIGUSR1"
scancel --signal=USR1 "$preempted"
finish "$preempted"
grep -E '^(==|srun:|Rest)|GLOBAL_RANK|max_steps' "$WORK/preempted-$preempted.out"
scontrol show job "$preempted" | grep -q 'Restarts=1 '

"$(dirname "$ANLIT")/python" - "$WORK/runs" "$STEPS" << 'PYTHON'
import json, sys
from pathlib import Path

import torch

runs, steps = Path(sys.argv[1]), int(sys.argv[2])
one, two = (torch.load(runs / name / "checkpoints/last.ckpt", weights_only=True) for name in ("undisturbed", "preempted"))
assert one["global_step"] == two["global_step"] == steps, (one["global_step"], two["global_step"])
different = [name for name, value in one["state_dict"].items() if not torch.equal(value, two["state_dict"][name])]
assert not different, f"the weights differ: {different}"
assert len(json.loads((runs / "preempted/run.json").read_text())["launches"]) == 2, "the run was not resumed"
print(f"== the same {len(one['state_dict'])} tensors to the bit after {steps} steps, with and without pre-emption")
PYTHON

echo "== cancelled by its user"
cancelled=$(submit cancelled)
wait_for test -e "$WORK/runs/cancelled/checkpoints/last.ckpt"
scancel "$cancelled"
wait_for has_ended "$cancelled"
sleep 10
scontrol show job "$cancelled" | grep -E -o 'JobState=\S+|Restarts=\S+' | tr '\n' ' '
echo
[[ $(state "$cancelled") == CANCELLED ]]

echo "== one of two processes dies, the other hangs"
# shellcheck disable=SC2016  # for the process, not for this shell
printf '#!/bin/sh\n[ "$SLURM_PROCID" = 0 ] || exit 3\ntrap "" TERM\nwhile :; do sleep 1; done\n' > "$WORK/hangs"
chmod +x "$WORK/hangs"
began=$(date +%s)
dying=$(submit dying "$WORK/hangs")
wait_for has_ended "$dying"
grep -E '^(==|srun:)' "$WORK/dying-$dying.out"
seconds=$(($(date +%s) - began))
echo "== ended as $(state "$dying") after $seconds s"
[[ $(state "$dying") == FAILED ]] && ((seconds < 75))
