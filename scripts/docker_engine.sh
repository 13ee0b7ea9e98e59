#!/usr/bin/env bash
# A Docker engine of its own for `make check-deploy`, where none runs and no image can be pulled.
#
#   scripts/docker_engine.sh up      installs what is missing (Debian, root), starts dockerd with its own data folder
#                                    and socket, makes python:3.11-slim from Debian's packages; prints DOCKER_HOST=
#                                    and DOCKER_CONFIG= (a folder with the plugins compose and buildx)
#   scripts/docker_engine.sh down    ends that dockerd and removes its data
set -euo pipefail

HOME_DIR=${RADIXFLEET_DOCKER_DIR:-/tmp/radixfleet-docker}
BASE=python:3.11-slim
export DOCKER_HOST=unix://$HOME_DIR/docker.sock DOCKER_CONFIG=$HOME_DIR/config

fail() {
  echo "no Docker engine can be had here: $1" >&2
  exit 1
}

answers() { timeout 10 docker version >/dev/null 2>&1; }

mirror() {
  local found
  found=$(grep -rhoE 'https?://[^ ]*debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null |
    head -n 1 || true)
  found=${found% }
  echo "${found:-http://deb.debian.org/debian}"
}

quietly() { # LOG COMMAND...: a command that answers nobody
  local log=$HOME_DIR/$1
  shift
  "$@" >"$log" 2>&1 </dev/null || { tail -n 5 "$log" >&2; return 1; }
}

install_packages() {
  local tool missing=
  for tool in dockerd docker-compose debootstrap; do
    command -v "$tool" >/dev/null || missing+=" $tool"
  done
  [ -n "$missing" ] || return 0
  command -v apt-get >/dev/null || fail "missing:$missing, and there is no apt-get to install it with"
  quietly apt.log apt-get update -qq || fail "apt-get update failed"
  DEBIAN_FRONTEND=noninteractive quietly apt.log apt-get install -y -qq --no-install-recommends \
    docker.io docker-compose debootstrap iptables cgroupfs-mount || fail "apt-get install failed"
}

# Debian 12 has docker-compose 1.29 alone; the plugins come from Debian 13 and need no more than libc. Without them the
# older program is tried and images are built one after the other.
install_plugins() {
  local apt=$HOME_DIR/apt
  docker compose version >/dev/null 2>&1 && docker buildx version >/dev/null 2>&1 && return
  command -v apt-get >/dev/null || return 0
  mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$DOCKER_CONFIG/cli-plugins"
  echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $(mirror) trixie main" >"$apt/sources.list"
  local options=(-o "Dir::Etc::sourcelist=$apt/sources.list" -o Dir::Etc::sourceparts=- -o "Dir::State::lists=$apt/lists"
    -o "Dir::Cache=$apt/cache" -o APT::Sandbox::User=root -o Acquire::Languages=none)
  (cd "$apt" && quietly plugins.log apt-get "${options[@]}" update -qq &&
    quietly plugins.log apt-get "${options[@]}" download docker-compose docker-buildx) ||
    { echo "the plugins compose and buildx cannot be had" >&2; return 0; }
  local package
  for package in "$apt"/*.deb; do dpkg-deb -x "$package" "$apt/files"; done
  cp "$apt"/files/usr/libexec/docker/cli-plugins/docker-* "$DOCKER_CONFIG/cli-plugins/"
  rm -rf "$apt"
}

start_engine() {
  answers && return
  mountpoint -q /sys/fs/cgroup || cgroupfs-mount || fail "no cgroups are mounted"
  setsid dockerd --data-root "$HOME_DIR/data" --exec-root "$HOME_DIR/exec" --host "$DOCKER_HOST" \
    --pidfile "$HOME_DIR/pid" >"$HOME_DIR/dockerd.log" 2>&1 </dev/null &
  local dockerd=$!
  for _ in $(seq 120); do
    answers && return
    kill -0 "$dockerd" 2>/dev/null || break
    sleep 0.5
  done
  fail "dockerd does not start: $(grep -v level=info "$HOME_DIR/dockerd.log" | tail -n 3)"
}

# Debian 12 has Python 3.11. This machine's certificates go along, so that pip inside a build trusts what pip outside
# trusts. Manuals and translations do not: most of the time goes into unpacking.
make_base_image() {
  docker image inspect "$BASE" >/dev/null 2>&1 && return
  local root=$HOME_DIR/root
  quietly debootstrap.log debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm \
    "$root" "$(mirror)" || fail "debootstrap failed"
  ln -sf python3 "$root/usr/bin/python"
  rm -rf "$root"/usr/lib/python3.*/EXTERNALLY-MANAGED "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/* \
    "$root"/usr/share/{man,doc,locale}/*
  cp -L --remove-destination /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\ndefault-timeout = 180\n' >"$root/etc/pip.conf"
  tar -C "$root" -c . | docker import --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
    --change 'CMD ["python3"]' - "$BASE" >/dev/null
  rm -rf --one-file-system "$root"
}

# In memory where there is plenty: nothing waits for the disk, and tens of thousands of files are gone with the mount.
make_home() {
  mkdir -p "$HOME_DIR"
  if ! answers && [ "$(awk '/^MemAvailable/ { print int($2 / 1048576) }' /proc/meminfo)" -ge 12 ]; then
    mount -t tmpfs -o size=8g,mode=700 radixfleet-docker "$HOME_DIR" || true
  fi
  mkdir -p "$DOCKER_CONFIG"
}

is_dockerd() { [ "$(cat "/proc/$1/comm" 2>/dev/null)" = dockerd ]; }

stop_engine() {
  local pid
  if pid=$(cat "$HOME_DIR/pid" 2>/dev/null) && is_dockerd "$pid"; then
    kill "$pid" || true
    for _ in $(seq 120); do # it goes on for a while after it stops to answer
      is_dockerd "$pid" || break
      sleep 0.5
    done
  fi
  # Network namespaces, what debootstrap had mounted, and the data folder itself where dockerd has made it a mount.
  awk -v home="$HOME_DIR" '$2 == home || index($2, home "/") == 1 { print $2 }' /proc/self/mounts | sort -r |
    xargs -r -n 1 umount || true
  rm -rf --one-file-system "$HOME_DIR"
}

case "${1:-}" in
  up)
    [ "$(id -u)" = 0 ] || fail "none answers, and to start one needs root"
    answers || stop_engine # what one that was killed has left
    make_home
    install_packages
    install_plugins &
    plugins=$!
    trap 'kill "$plugins" 2>/dev/null || true' EXIT
    start_engine
    make_base_image
    wait "$plugins"
    echo "DOCKER_HOST=$DOCKER_HOST"
    echo "DOCKER_CONFIG=$DOCKER_CONFIG"
    ;;
  down) stop_engine ;;
  *)
    echo "usage: $0 up|down" >&2
    exit 2
    ;;
esac
