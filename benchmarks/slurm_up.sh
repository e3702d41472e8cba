#!/bin/bash
# Slurm with two nodes, n1 and n2, on this machine, as root and without systemd; state under $1.
# Needs: apt-get install -y --no-install-recommends slurmctld slurmd slurm-client munge
set -e
folder=${1:?a folder for the state, as an absolute path}
[ ${#folder} -le 80 ] || { echo "give a folder of at most 80 characters, as paths of sockets are short: $folder"; exit 2; }
mkdir -p "$folder"/{ctl,n1,n2,log}
host=$(hostname -s)
cat > "$folder/slurm.conf" <<X
ClusterName=one
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
StateSaveLocation=$folder/ctl
SlurmdSpoolDir=$folder/%n
SlurmctldPidFile=$folder/ctl.pid
SlurmdPidFile=$folder/%n.pid
SlurmctldLogFile=$folder/log/ctl
SlurmdLogFile=$folder/log/%n
SlurmctldPort=16817
ReturnToService=2
KillWait=5
MinJobAge=300
SlurmdParameters=config_overrides
JobRequeue=1
NodeName=n1 NodeHostname=$host NodeAddr=127.0.0.1 Port=17001 CPUs=2 State=UNKNOWN
NodeName=n2 NodeHostname=$host NodeAddr=127.0.0.1 Port=17002 CPUs=2 State=UNKNOWN
PartitionName=p Nodes=n1,n2 Default=YES MaxTime=INFINITE State=UP OverSubscribe=FORCE:4
X
export SLURM_CONF=$folder/slurm.conf
mkdir -p /run/munge; chown munge: /run/munge
if ! pidof -q munged; then
    chown -R munge: /var/log/munge /var/lib/munge
    setpriv --reuid munge --regid munge --clear-groups munged --force
fi
slurmctld -f "$SLURM_CONF"
slurmd -f "$SLURM_CONF" -N n1
slurmd -f "$SLURM_CONF" -N n2
for _ in $(seq 100); do
    [ "$(sinfo -h -t idle -o %D 2>/dev/null)" = 2 ] && break
    sleep .1
done
sinfo
