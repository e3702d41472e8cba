#!/bin/bash
# Two "hosts", zja (10.77.0.1) and zjb (10.77.0.2): network namespaces behind a switch without an
# uplink. `two_hosts.sh up`, `two_hosts.sh down`, `two_hosts.sh on HOST COMMAND...`.
case $1 in
up)
  set -e
  ip netns add zjsw
  ip -n zjsw link add br0 type bridge
  ip -n zjsw link set br0 up
  n=1
  for host in zja zjb; do
    ip netns add $host
    ip -n $host link add eth0 type veth peer name p$host netns zjsw
    ip -n zjsw link set p$host master br0
    ip -n zjsw link set p$host up
    ip -n $host link set lo up
    ip -n $host addr add 10.77.0.$n/24 dev eth0
    ip -n $host link set eth0 up
    mkdir -p /etc/netns/$host
    printf '127.0.0.1 localhost\n10.77.0.1 zja\n10.77.0.2 zjb\n' > /etc/netns/$host/hosts
    n=$((n + 1))
  done ;;
down)
  for host in zja zjb zjsw; do
    ip netns pids $host 2>/dev/null | xargs -r kill -9
    ip netns del $host 2>/dev/null
  done
  rm -rf /etc/netns/zja /etc/netns/zjb ;;
on)  # mpirun and gloo look at the host's name
  host=$2
  shift 2
  exec ip netns exec "$host" unshare --uts bash -c 'hostname "$0"; exec "$@"' "$host" "$@" ;;
*)  # mpirun's agent in place of ssh: OPTIONS HOST COMMAND...
  while [ "${1#-}" != "$1" ]; do shift; done
  host=$1
  shift
  exec "$0" on "$host" bash -c "$*" ;;
esac
