#!/usr/bin/env bash
# Run a command on the login node of a SLURM cluster of two nodes, node1 and node2, which are all on this machine:
#
#     tests/helpers/cluster.sh sbatch --wait --gpus-per-node=2 slurm/ddp_2nodes.sh cifar10/ddp_launch.py --synthetic
#     tests/helpers/cluster.sh bash
#
# It needs root, and Debian's slurm-wlm munge iproute2 openssh-server. Its daemons, links and mounts are in their own
# namespaces, which the kernel removes when the command ends, however it ends. The nodes claim to have GPUs, so that
# SLURM accepts GPU jobs, but torch sees none; with GPUS=0 they claim none.
set -euo pipefail
if [ $$ != 1 ]; then
    exec unshare --fork --pid --kill-child --mount-proc --mount --net --uts "$0" "$@"
fi

mount -t tmpfs tmpfs /run
mount -t tmpfs tmpfs /dev/shm
etc=/run/cluster
mkdir -p $etc/{state,tmp.node1,tmp.node2} /run/{munge,sshd}
hostname login

# A bridge, and for each node a network namespace with one link to it. All have an eth0, as horovodrun asks the nodes
# which interfaces they have in common, and then looks for those where it runs
addresses="10.0.0.1 login
10.0.0.11 node1
10.0.0.12 node2"
printf '127.0.0.1 localhost\n%s\n' "$addresses" > $etc/hosts
mount --bind $etc/hosts /etc/hosts
ip link set lo up
ip link add eth0 type bridge
ip addr add 10.0.0.1/24 dev eth0
ip link set eth0 up
for node in node1 node2; do
    ip netns add $node
    ip link add link-$node type veth peer name eth0 netns $node
    ip link set link-$node master eth0 up
    ip -n $node link set lo up
    ip -n $node addr add 10.0.0.1${node#node}/24 dev eth0
    ip -n $node link set eth0 up
done
on_node() {  # not `ip netns exec`, which mounts a /sys without the cgroups that slurmd looks at
    nsenter --net="/run/netns/$1" unshare --uts bash -c "hostname $1; exec $2"
}

# ssh from any of them to any other
ssh-keygen -q -t ed25519 -N '' -f $etc/key
cat > $etc/ssh_config <<END
IdentityFile $etc/key
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
END
mount --bind $etc/ssh_config /etc/ssh/ssh_config
for node in node1 node2; do
    on_node $node "$(command -v sshd) -f /dev/null -h $etc/key -o AuthorizedKeysFile=$etc/key.pub -o StrictModes=no \
        -o PermitRootLogin=yes -o UsePAM=no"
done

# SLURM
dd if=/dev/urandom of=$etc/munge.key bs=1 count=1024 status=none
chmod 700 $etc/munge.key
munged --key-file=$etc/munge.key --log-file=$etc/munged.log --seed-file=$etc/munge.seed
cat > $etc/slurm.conf <<END
ClusterName=test
SlurmctldHost=login(10.0.0.1)
SlurmUser=root
AuthType=auth/munge
# How long a job waits until it starts again, by default 120 s. It has to be KillWait or more (by default 30 s): when a
# node fails, a job is queued again without waiting for that node, which kills what is left of the job after KillWait,
# and by then that could be the job started again
AuthInfo=cred_expire=10
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
ReturnToService=2
KillWait=10
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=0,sched_interval=1
StateSaveLocation=$etc/state
SlurmctldPidFile=$etc/slurmctld.pid
SlurmctldLogFile=$etc/slurmctld.log
SlurmdPidFile=$etc/%n.pid
SlurmdLogFile=$etc/%n.log
SlurmdSpoolDir=$etc/%n
# One for each node, or \`srun --mpi=pmix\` finds the files of the other
TmpFS=$etc/tmp.%n
# A job of the partition urgent takes the place of others, after 20 s
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=ALL Default=YES GraceTime=20
PartitionName=urgent Nodes=ALL PriorityTier=2 PreemptMode=OFF
NodeName=DEFAULT CPUs=32 RealMemory=4000
END
if [ "${GPUS:-8}" != 0 ]; then
    touch $etc/gpu{0..7}
    echo "Name=gpu File=$etc/gpu[0-7]" > $etc/gres.conf
    printf 'GresTypes=gpu\nNodeName=DEFAULT Gres=gpu:8\n' >> $etc/slurm.conf
fi
printf 'NodeName=node%s NodeAddr=10.0.0.1%s\n' 1 1 2 2 >> $etc/slurm.conf
mount --bind $etc /etc/slurm
slurmctld
for node in node1 node2; do
    on_node $node "slurmd -N $node"
done
for _ in {1..400}; do
    [ "$(sinfo --noheader --states=idle --format=%D)" != 2 ] || break
    sleep 0.2
done
[ "$(sinfo --noheader --states=idle --format=%D)" = 2 ] || { tail -n 20 $etc/*.log >&2; exit 1; }
"$@"
