#!/usr/bin/env bash
# A Docker engine of its own for `make check-deploy`, where none runs and no image can be pulled.
#
#   scripts/docker_engine.sh up      installs what is missing (Debian, root), starts dockerd with its own data folder
#                                    and socket, makes python:3.11-slim from Debian's packages; prints DOCKER_HOST
#   scripts/docker_engine.sh down    ends that dockerd and removes its data
set -euo pipefail

HOME_DIR=${RADIXFLEET_DOCKER_DIR:-/tmp/radixfleet-docker}
BASE=python:3.11-slim
export DOCKER_HOST=unix://$HOME_DIR/docker.sock

answers() { docker version >/dev/null 2>&1; }

await_engine() {
  for _ in $(seq 120); do
    answers && return 0
    sleep 0.5
  done
  return 1
}

install_packages() {
  for tool in dockerd docker-compose debootstrap; do
    command -v "$tool" >/dev/null && continue
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq docker.io docker-compose debootstrap >"$HOME_DIR/apt.log" 2>&1
    return
  done
}

start_engine() {
  answers && return
  setsid dockerd --data-root "$HOME_DIR/data" --exec-root "$HOME_DIR/exec" --host "$DOCKER_HOST" \
    --pidfile "$HOME_DIR/pid" >"$HOME_DIR/dockerd.log" 2>&1 &
  await_engine || { tail -n 5 "$HOME_DIR/dockerd.log" >&2; exit 1; }
}

# Debian 12 has Python 3.11. This machine's certificates, package indexes and wheels go along, so that pip inside a
# build finds what pip outside finds.
make_base_image() {
  docker image inspect "$BASE" >/dev/null 2>&1 && return
  local root=$HOME_DIR/root mirror
  mirror=$(grep -rhoE 'https?://[^ ]*debian/?( |$)' /etc/apt/sources.list /etc/apt/sources.list.d 2>/dev/null | head -n 1 || true)
  debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates bookworm "$root" \
    ${mirror:+"${mirror% }"} >"$HOME_DIR/debootstrap.log" 2>&1
  ln -sf python3 "$root/usr/bin/python"
  rm -f "$root"/usr/lib/python3.*/EXTERNALLY-MANAGED
  cp -L --remove-destination /etc/ssl/certs/ca-certificates.crt "$root/etc/ssl/certs/"
  local wheels=/usr/local/share/wheels
  mkdir -p "$root$wheels"
  if [ -d "${PIP_FIND_LINKS:-}" ]; then cp "$PIP_FIND_LINKS"/*.whl "$root$wheels/" 2>/dev/null || true; fi
  printf '[global]\ncert = /etc/ssl/certs/ca-certificates.crt\nfind-links = %s\ndefault-timeout = 180\n' "$wheels" \
    >"$root/etc/pip.conf"
  tar -C "$root" -c . | docker import --change 'ENV SSL_CERT_FILE=/etc/ssl/certs/ca-certificates.crt' \
    --change 'CMD ["python3"]' - "$BASE" >/dev/null
  rm -rf "$root"
}

stop_engine() {
  if [ -f "$HOME_DIR/pid" ]; then
    local pid
    pid=$(cat "$HOME_DIR/pid")
    kill "$pid" 2>/dev/null || true
    for _ in $(seq 120); do # it goes on for a while after it stops to answer
      kill -0 "$pid" 2>/dev/null || break
      sleep 0.5
    done
  fi
  umount "$HOME_DIR"/exec/netns/* 2>/dev/null || true
  rm -rf "$HOME_DIR"
}

case "${1:-}" in
  up)
    mkdir -p "$HOME_DIR"
    install_packages
    start_engine
    make_base_image
    echo "$DOCKER_HOST"
    ;;
  down) stop_engine ;;
  *)
    echo "usage: $0 up|down" >&2
    exit 2
    ;;
esac
