#!/bin/sh
# PACKAGE=WHAT install.sh [WHEELHOUSE]: installs lightyear-node on a machine with systemd and Python
# 3.11 or newer.  WHAT is a folder, a wheel or a URL, with extras: .[demo]; from a WHEELHOUSE also a name:
# lightyear-node[medical]==0.1.0.  Run as root.  Touches /opt/lightyear-node, /usr/local/bin/lightyear-node, /etc/systemd/system,
# /etc/sysusers.d, /etc/tmpfiles.d and the folder /var/lib/lightyear-node; starts nothing.
# Running it again upgrades: docs/operators/upgrade.md.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

# The name is not registered on PyPI: pip would install whatever is uploaded under it.
refuse() {
  cat >&2 <<WHY
$1
lightyear-node is not on PyPI: by its name alone, pip would install as root whatever a stranger has
uploaded there under that name (dependency confusion).  Say what to install:
  PACKAGE='.[demo]' sh $0                          # this copy of the repository
  PACKAGE='lightyear-node[demo]' sh $0 WHEELS      # a folder of wheels, and no index
  PIP_INDEX_URL=https://… PACKAGE=lightyear-node sh $0   # your own index, in place of PyPI
WHY
  exit 1
}
what=${PACKAGE:-}
[ -n "$what" ] || refuse "PACKAGE is not set."
if [ $# -eq 0 ] && [ -z "${PIP_INDEX_URL:-}" ] && [ ! -e "${what%%[[]*}" ]; then
  case $what in
    *://*) ;;
    *) refuse "PACKAGE=$what is no file or folder here, but a name that pip would look up on PyPI." ;;
  esac
fi

[ "$(id -u)" = 0 ] || { echo "run this as root" >&2; exit 1; }
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
  { echo "$python is older than 3.11: name another, PYTHON=python3.11 sh $0" >&2; exit 1; }

# The program, in its own virtual environment, with the tested versions; without internet from a
# folder of wheels.
"$python" -m venv /opt/lightyear-node
if [ $# -gt 0 ]; then
  /opt/lightyear-node/bin/pip install --quiet --upgrade --no-index --find-links "$1" "$what"
else
  /opt/lightyear-node/bin/pip install --quiet --upgrade -c "$here/../../constraints.txt" "$what"
fi
ln -sf /opt/lightyear-node/bin/lightyear-node /usr/local/bin/lightyear-node

# The user, its folder, the service.
install -D -m 0644 "$here/lightyear-node.sysusers" /etc/sysusers.d/lightyear-node.conf
install -D -m 0644 "$here/lightyear-node.tmpfiles" /etc/tmpfiles.d/lightyear-node.conf
install -D -m 0644 "$here/lightyear-node.service" /etc/systemd/system/lightyear-node.service
systemd-sysusers /etc/sysusers.d/lightyear-node.conf
systemd-tmpfiles --create /etc/tmpfiles.d/lightyear-node.conf
[ ! -d /run/systemd/system ] || systemctl daemon-reload

cat <<'NEXT'
Installed.  Next, as root:
  cd /var/lib/lightyear-node
  runuser -u lightyear -- lightyear-node init . --name NAME --address HOST:7443 --listen 0.0.0.0:7443
    (--address is where the others reach this site; behind a NAT or a port forwarding it is not this
    machine's own, so --listen says where to listen; --address none, without --listen: no port at all)
  runuser -u lightyear -- lightyear-node id        # the line that the other hospitals need
  … put the agreed peers.yaml here, then
  runuser -u lightyear -- lightyear-node check
  systemctl enable --now lightyear-node
NEXT
